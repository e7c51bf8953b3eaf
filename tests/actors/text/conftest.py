"""Small tokenizers of every kind, trained here, and the default model's if it is pulled."""

from __future__ import annotations

import json

import pytest
from actors.text.streams import Streams
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from ringcast.actors.text.text_tokenizer import TextTokenizer, load_tokenizer
from ringcast.frontend.hub.cache import models_folder
from ringcast.mq.config import DEFAULT_MODEL, ModelSpec

SENTENCES = [
    "The quick brown fox jumps over the lazy dog, and the dog sleeps on.",
    "  Two blanks first, then\n\ta tab and a newline.\n\n",
    "Zażółć gęślą jaźń; Fußgängerübergänge; où est la bibliothèque ?",
    "敏捷的棕色狐狸跳过懒狗。日本語のテキストです。한국어 문장입니다.",
    "Быстрая лиса прыгает. Η γρήγορη αλεπού. الثعلب السريع. देवनागरी लिपि",
    "def f(x): return {'a': x ** 2}  # 👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽",
]
SPECIAL = ("<s>", "</s>")


def _add_tokens(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    tokenizer.add_tokens([AddedToken("<tool>", special=False), AddedToken("ab cd", special=False)])
    return tokenizer


def _byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(SENTENCES, trainer)
    return _add_tokens(tokenizer)


def _blank_bpe() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """A vocabulary in which "▁" stands for a blank, and which lacks most letters."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.train_from_iterator(
        SENTENCES[:3], trainers.BpeTrainer(vocab_size=200, show_progress=False)
    )
    model = json.loads(tokenizer.to_str())["model"]
    return model["vocab"], [(left, right) for left, right in model["merges"]]


def _llama_like() -> Tokenizer:
    trained, merges = _blank_bpe()
    names = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *trained]
    vocab = {name: i for i, name in enumerate(names)}
    model = models.BPE(vocab, merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    _add_tokens(tokenizer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    return tokenizer


def _gemma_like() -> Tokenizer:
    tokenizer = _llama_like()
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return tokenizer


def _metaspace(scheme: str) -> Tokenizer:
    trained, merges = _blank_bpe()
    vocab = {name: i for i, name in enumerate(["<unk>", *trained])}
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme=scheme)
    return _add_tokens(tokenizer)


def _word_piece() -> Tokenizer:
    words = ["[UNK]", "the", "quick", "##er", "fox", "##es", ",", ".", "'", "s", "jump"]
    vocab = {word: i for i, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    return _add_tokens(tokenizer)


BY_BYTES = {
    "byte_level": _byte_level,
    "llama_like": _llama_like,
    "gemma_like": _gemma_like,
    "metaspace_always": lambda: _metaspace("always"),
    "metaspace_never": lambda: _metaspace("never"),
}


@pytest.fixture(scope="session", params=sorted(BY_BYTES))
def by_bytes(request: pytest.FixtureRequest) -> TextTokenizer:
    """A tokenizer whose decoder goes token by token: each kind in turn."""
    return TextTokenizer(BY_BYTES[request.param]())


@pytest.fixture(scope="session")
def byte_level() -> TextTokenizer:
    special_tokens = {"bos_token": "<s>", "eos_token": "</s>"}
    return TextTokenizer(_byte_level(), special_tokens)


@pytest.fixture(scope="session")
def llama_like() -> TextTokenizer:
    return TextTokenizer(_llama_like(), {"bos_token": "<s>"})


@pytest.fixture(scope="session")
def word_piece() -> TextTokenizer:
    """A tokenizer whose decoder looks at more than one token."""
    return TextTokenizer(_word_piece())


@pytest.fixture(scope="session")
def smollm2() -> TextTokenizer:
    folder = models_folder() / DEFAULT_MODEL
    if not (folder / "tokenizer.json").exists():
        pytest.skip("the default model is not pulled")
    return load_tokenizer(str(folder))


@pytest.fixture(scope="session")
def spec(byte_level: TextTokenizer) -> ModelSpec:
    return ModelSpec(
        name="tiny",
        path="",
        tokenizer_path="",
        architecture="LlamaForCausalLM",
        vocab_size=byte_level.vocab_size,
        max_model_len=64,
        eos_token_ids=[byte_level.backend.token_to_id("</s>")],
        hf_config={},
    )


@pytest.fixture
def streams(spec: ModelSpec, byte_level: TextTokenizer) -> Streams:
    return Streams(spec, byte_level)
