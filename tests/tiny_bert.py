"""A small random BERT encoder as sentence-transformers lays one out, and transformers' answer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, processors

CLS, SEP = 1, 2
DIMENSION, MAX_LENGTH = 48, 64
SHAPE = {
    "vocab_size": 60,
    "hidden_size": DIMENSION,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 80,
    "max_position_embeddings": 96,
}
MODULES = ("Transformer", "Pooling", "Normalize")


def make_tiny_bert(
    folder: Path,
    modules: tuple[str, ...] = MODULES,
    pooling: str = "mean_tokens",
    **shape: Any,
) -> Any:
    """Write the folder; returns transformers' model. No modules.json without `modules`."""
    import torch
    import transformers

    torch.manual_seed(3)
    made = transformers.BertModel(transformers.BertConfig(**{**SHAPE, **shape})).eval()
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, 0.0, 0.3)
    made.save_pretrained(folder)
    _tokenizer().save(str(folder / "tokenizer.json"))
    write_modules(folder, modules, {f"pooling_mode_{pooling}": True})
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": MAX_LENGTH}))
    return made


def write_modules(folder: Path, modules: tuple[str, ...], pooling: dict[str, Any]) -> None:
    if not modules:
        (folder / "modules.json").unlink(missing_ok=True)
        return
    paths = {"Transformer": "", "Pooling": "1_Pooling", "Normalize": "2_Normalize"}
    listed = [
        {"idx": i, "name": str(i), "path": paths.get(name, ""), "type": f"sentence_x.models.{name}"}
        for i, name in enumerate(modules)
    ]
    (folder / "modules.json").write_text(json.dumps(listed))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))


def expected(
    model: Any, token_ids: list[int], kind: str = "mean", normalize: bool = True
) -> list[float]:
    """The vector by transformers' model, of one sequence by itself."""
    import torch

    with torch.inference_mode():
        hidden = model(input_ids=torch.tensor([token_ids])).last_hidden_state[0]
    vector = {"mean": hidden.mean(0), "cls": hidden[0], "last": hidden[-1]}[kind]
    if normalize:
        vector = vector / vector.norm()
    values: list[float] = vector.tolist()
    return values


def _tokenizer() -> Tokenizer:
    """Letters and digits between [CLS] and [SEP], padded and cut as files from training are."""
    letters = [*"abcdefghijklmnopqrstuvwxyz0123456789"]
    words = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", *letters, "##a", "##b"]
    vocab = {word: i for i, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordPiece(vocab=vocab, unk_token="[UNK]"))
    tokenizer.add_special_tokens([AddedToken(word, special=True) for word in words[:4]])
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", CLS), ("[SEP]", SEP)]
    )
    tokenizer.enable_truncation(max_length=8)
    tokenizer.enable_padding(length=8)
    return tokenizer
