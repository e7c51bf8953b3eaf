"""The reasoning of Mistral's models (Magistral): the model writes [THINK], or there is none."""

from __future__ import annotations

from .think import ThinkParser


class MistralThinkParser(ThinkParser):
    opener = "[THINK]"
    markers = (opener, "[/THINK]")
    begins = ("[/THINK]",)
