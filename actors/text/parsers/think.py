"""Reasoning between two marks such as <think> and </think>, at the beginning of an output."""

from __future__ import annotations

from typing import ClassVar, NoReturn

from .parser import ANYTHING, Content, Grammar, Parser, Reasoning


class ThinkParser(Parser):
    """`begins` has the end mark. Without it the reasoning goes on to the end of the text.

    opener: the mark that begins the reasoning. Where a chat template writes it at the end of the
        prompt, the text that is parsed is given it at its beginning.
    inside: an output that doesn't begin with it begins within the reasoning all the same. Otherwise
        all of it is content.
    """

    opener: ClassVar[str] = "<think>"
    inside: ClassVar[bool] = False
    markers = (opener, "</think>")
    begins = ("</think>",)

    def _parse(self) -> Grammar[NoReturn]:
        self._kind = Reasoning if self.inside else Content
        begin = yield from self._begin()
        if self.inside or not begin:
            self._kind = Reasoning
            yield from self._find(begin)
            self._held.clear()
        self._kind = Content
        self._release()
        self._plain_text = True
        while True:
            yield ANYTHING

    def _begin(self) -> Grammar[str]:
        """What comes in the place of the opener, and is held; nothing if that came."""
        seen = ""  # without the whitespace before it
        while self.opener.startswith(seen):
            letter = yield None
            if seen or not letter.isspace():
                seen += letter
            if seen == self.opener:
                self._held.clear()
                return ""
        return "".join(self._held)
