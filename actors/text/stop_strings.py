"""Finds stop strings in a text that arrives piece by piece.

The rules:

1. The match that is complete first wins; of those that end at the same place, the longest. So the
   result is the same however the text is cut into pieces.
2. Text that may yet prove to be the beginning of a stop string is held back; all other text is
   released at once.
3. Only a match that the new piece completes counts. A piece may be fed unarmed (before min_tokens):
   what it completes is passed over for good, what it begins is not.
"""

from __future__ import annotations


class StopStrings:
    """The search state of one stream. `include` leaves a found stop string in the text."""

    def __init__(self, stops: tuple[str, ...], include: bool) -> None:
        self._stops = stops
        self._include = include
        self._first_letters = frozenset(stop[0] for stop in stops)
        self._held = ""

    def feed(self, piece: str, armed: bool = True) -> tuple[str, str | None]:
        """The text that `piece` releases, and the stop string that it completes, if any."""
        if not self._held and self._first_letters.isdisjoint(piece):
            return piece, None
        text = self._held + piece
        if armed and (match := self._first_match(text)):
            end, stop = match
            self._held = ""
            return text[: end if self._include else end - len(stop)], stop
        keep = self._begin_of_held(text)
        self._held = text[keep:]
        return text[:keep], None

    def release(self) -> str:
        """The text still held, at the end of the stream."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, text: str) -> tuple[int, str] | None:
        num_old = len(self._held)
        best: tuple[int, int, str] | None = None
        for stop in self._stops:
            place = text.find(stop, max(0, num_old + 1 - len(stop)))
            if place >= 0:
                found = (place + len(stop), -len(stop), stop)
                best = found if best is None else min(best, found)
        return best and (best[0], best[2])

    def _begin_of_held(self, text: str) -> int:
        """Where the longest end of `text` begins that some stop string begins with."""
        begin = len(text)
        for stop in self._stops:
            place = text.find(stop[0], max(0, len(text) + 1 - len(stop)), begin)
            while place >= 0:
                if stop.startswith(text[place:]):
                    begin = place
                    break
                place = text.find(stop[0], place + 1, begin)
        return begin
