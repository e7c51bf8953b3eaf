"""The detokenizer actor: token ids become text, and text the events of a stream."""

from __future__ import annotations

from .base import Actor
from .core import Core
from .text.detokenizer_core import DetokenizerCore
from .text.text_tokenizer import load_tokenizer


class Detokenizer(Actor):
    def make_core(self) -> Core:
        spec = self.boot.spec
        tokenizer = load_tokenizer(spec.tokenizer_path) if spec.tokenizer_path else None
        return DetokenizerCore(spec, tokenizer)
