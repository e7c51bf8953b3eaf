"""The tokenizer actor: chat templates and prompts become token ids."""

from __future__ import annotations

from . import topology
from .base import Actor
from .core import Core
from .text.text_tokenizer import load_tokenizer
from .text.tokenizer_core import TokenizerCore


class Tokenizer(Actor):
    def make_core(self) -> Core:
        spec = self.boot.spec
        tokenizer = load_tokenizer(spec.tokenizer_path) if spec.tokenizer_path else None
        return TokenizerCore(spec, tokenizer, topology.num_engines(self.boot.counts))
