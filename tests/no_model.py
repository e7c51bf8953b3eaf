"""A model's description for tests that load none."""

from __future__ import annotations

from ringcast.mq.config import ModelSpec

SPEC = ModelSpec(
    name="m",
    path="",
    tokenizer_path="",
    architecture="",
    vocab_size=9,
    max_model_len=9,
    eos_token_ids=[],
    hf_config={},
)
