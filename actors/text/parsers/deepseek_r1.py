"""The reasoning of DeepSeek R1 and of what was distilled from it: an output begins with it."""

from __future__ import annotations

from .think import ThinkParser


class DeepSeekR1Parser(ThinkParser):
    inside = True
