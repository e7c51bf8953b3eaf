"""A model for the fake device whose every output token is a word of its own: what a stream has lost
or repeated can be told from its text.
"""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

BOS, EOS = 0, 1
FIRST_WORD = 256  # the fake device never says a lower id
VOCAB_SIZE = 4096


def word(token_id: int) -> str:
    return f"{token_id:04d}"


def make_counting_model(folder: Path) -> None:
    """Write a config and a tokenizer: two special tokens, the letters, and a word for each id."""
    vocab = {"<s>": BOS, "</s>": EOS}
    for letter in sorted(pre_tokenizers.ByteLevel.alphabet())[: FIRST_WORD - len(vocab)]:
        vocab[letter] = len(vocab)
    vocab |= {f"Ġ{word(i)}": i for i in range(FIRST_WORD, VOCAB_SIZE)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in ("<s>", "</s>")])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": EOS}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
