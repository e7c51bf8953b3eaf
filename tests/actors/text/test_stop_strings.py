"""Stop strings are found wherever tokens cut the text, against a letter-by-letter oracle."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringcast.actors.text.stop_strings import StopStrings

short = st.text(alphabet="abc", min_size=1, max_size=4)


def run(
    stops: tuple[str, ...], pieces: list[str], include: bool = False, armed_from: int = 0
) -> tuple[str, str | None]:
    """The whole text released, and the stop string found."""
    search = StopStrings(stops, include)
    text = ""
    for i, piece in enumerate(pieces):
        released, found = search.feed(piece, armed=i >= armed_from)
        text += released
        if found is not None:
            return text, found
    return text + search.release(), None


def letter_by_letter(
    stops: tuple[str, ...], text: str, include: bool, armed_from: int = 0
) -> tuple[str, str | None]:
    """The same by looking at every beginning of the text."""
    for end in range(armed_from + 1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


@given(
    stops=st.lists(short, min_size=1, max_size=3).map(tuple),
    pieces=st.lists(st.text(alphabet="abc", max_size=4), max_size=8),
    include=st.booleans(),
)
def test_the_cuts_make_no_difference(
    stops: tuple[str, ...], pieces: list[str], include: bool
) -> None:
    text = "".join(pieces)
    assert run(stops, pieces, include) == letter_by_letter(stops, text, include)


@given(
    stops=st.lists(short, min_size=1, max_size=3).map(tuple),
    pieces=st.lists(st.text(alphabet="abc", max_size=4), max_size=8),
    armed_from=st.integers(0, 8),
)
def test_unarmed_pieces_complete_nothing(
    stops: tuple[str, ...], pieces: list[str], armed_from: int
) -> None:
    text = "".join(pieces)
    num_unarmed = len("".join(pieces[:armed_from]))
    expected = letter_by_letter(stops, text, False, num_unarmed)
    assert run(stops, pieces, False, armed_from) == expected


@given(stop=short, text=st.text(alphabet="abc", max_size=12))
def test_only_what_may_begin_a_stop_string_is_held(stop: str, text: str) -> None:
    search = StopStrings((stop,), include=False)
    released, found = search.feed(text)
    if found is None:
        held = text[len(released) :]
        assert stop.startswith(held)
        longer = [text[i:] for i in range(len(released))]
        assert not any(stop.startswith(end) for end in longer)


@pytest.mark.parametrize(
    ("pieces", "include", "text"),
    [
        (["Hello", " wor", "ld\n", "\nUser: hi"], False, "Hello world"),
        (["Hello", " wor", "ld\n", "\nUser: hi"], True, "Hello world\n\nUser:"),
    ],
)
def test_across_tokens(pieces: list[str], include: bool, text: str) -> None:
    assert run(("\n\nUser:",), pieces, include) == (text, "\n\nUser:")


def test_text_is_released_as_soon_as_it_is_harmless() -> None:
    search = StopStrings(("<end>",), include=False)
    assert search.feed("abc <") == ("abc ", None)
    assert search.feed("en") == ("", None)
    assert search.feed("ds>") == ("<ends>", None)
    assert search.release() == ""


def test_a_very_long_stop_string_costs_no_table() -> None:
    stop = "a" * 1_000_000 + "b"
    search = StopStrings((stop,), include=False)
    assert search.feed("x" + "a" * 1000) == ("x", None)
    assert search.feed("c") == ("a" * 1000 + "c", None)
