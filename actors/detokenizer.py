"""The detokenizer actor: token ids become text, and text the events of a stream."""

from __future__ import annotations

from .base import Actor
from .core import Core
from .text.detokenizer_core import DetokenizerCore
from .text.text_tokenizer import load_tokenizer


class Detokenizer(Actor):
    def make_core(self) -> Core:
        spec = self.boot.spec
        has_text = spec.tokenizer_path and spec.pooling is None
        tokenizer = load_tokenizer(spec.tokenizer_path) if has_text else None
        return DetokenizerCore(spec, tokenizer)
