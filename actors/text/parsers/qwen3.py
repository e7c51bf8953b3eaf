"""The reasoning of Qwen3: the model writes <think>, or its chat template does, or there is none."""

from __future__ import annotations

from .think import ThinkParser


class Qwen3Parser(ThinkParser):
    inside = False
