"""Feeding parsers in every way."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise

import pytest

from ringcast.actors.text.parsers import TOOL_PARSERS, find_parser
from ringcast.actors.text.parsers.output_parser import ParsedOutput, put_together
from ringcast.actors.text.parsers.parser import Parser

LONGEST_CUT = 500  # in two, everywhere
Call = tuple[str, str]  # name, arguments
Parse = Callable[..., tuple[str, list[Call]]]


def pieces(text: str, cuts: Iterable[int]) -> list[str]:
    places = [0, *sorted({cut for cut in cuts if 0 < cut < len(text)}), len(text)]
    return [text[a:b] for a, b in pairwise(places)]


def read(parser: Parser, parts: Sequence[str]) -> ParsedOutput:
    deltas = [delta for part in parts for delta in parser.feed(part)]
    return put_together(deltas + parser.end())


@pytest.fixture
def parse(request: pytest.FixtureRequest) -> Parse:
    """parse(text): content and calls, as the module's PARSER finds them in any pieces, with its
    TYPES, if it has some.
    """
    kind = find_parser(TOOL_PARSERS, request.module.PARSER)
    types = getattr(request.module, "TYPES", None)

    def parse(text: str) -> tuple[str, list[Call]]:
        whole = read(kind("r/0", types), [text])
        for size in (1, 2, 3, 7):
            assert read(kind("r/0", types), pieces(text, range(0, len(text), size))) == whole
        for cut in range(1, len(text) if len(text) <= LONGEST_CUT else 0):
            assert read(kind("r/0", types), [text[:cut], text[cut:]]) == whole
        assert whole.reasoning == ""
        return whole.content, [(call.name, call.arguments) for call in whole.tool_calls]

    return parse
