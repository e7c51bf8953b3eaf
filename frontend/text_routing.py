"""Which tokenizer and which detokenizer a request goes by: those that have least to do for us.

What counts is what this client has with them: with a tokenizer the requests that it has not
answered, with a detokenizer the choices under way. Of equals it is the next in turn, from where the
client's number puts it. A request stays with both until one of them dies.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import msgspec

from ..mq.messages import Generate


class Tracked(Protocol):
    """What is needed of a request (handle.py). text_counted: (tokenizer, requests, detokenizer,
    choices) that it was counted as when it was last tracked."""

    text_counted: tuple[int, int, int, int]
    request: Generate

    @property
    def num_unanswered(self) -> int: ...

    @property
    def num_out(self) -> int: ...


class TextActors:
    """One client's view of the tokenizers, or the detokenizers, 0 to num - 1. All are up at first.

    index: the client's number.
    """

    def __init__(self, kind: str, num: int, index: int) -> None:
        self._kind = kind
        self._is_live = [True] * num
        self._own = [0] * num
        self._next = index % num

    @property
    def live(self) -> list[int]:
        return [number for number, is_live in enumerate(self._is_live) if is_live]

    def is_live(self, number: int) -> bool:
        return self._is_live[number]

    def lose(self, names: Iterable[str]) -> None:
        self._set(names, False)

    def regain(self, names: Iterable[str]) -> None:
        self._set(names, True)

    def count(self, number: int, more: int) -> None:
        """We have more with it, or less."""
        self._own[number] += more

    def choose(self) -> int:
        """For what is sent next. One at least must live."""
        num = len(self._own)
        in_turn = ((self._next + i) % num for i in range(num))
        number = min((n for n in in_turn if self._is_live[n]), key=self._own.__getitem__)
        self._next = (number + 1) % num
        return number

    def kept(self, number: int) -> int:
        """This one if it lives, else another."""
        return number if self._is_live[number] else self.choose()

    def _set(self, names: Iterable[str], is_live: bool) -> None:
        for name in names:
            kind, _, number = name.partition(".")
            if kind == self._kind:
                self._is_live[int(number)] = is_live


def is_text(names: Iterable[str]) -> bool:
    """Whether any of these is one of either kind."""
    return any(name.partition(".")[0] in ("tokenizer", "detokenizer") for name in names)


class TextRouter:
    """Both kinds."""

    def __init__(self, num_tokenizers: int = 1, num_detokenizers: int = 1, index: int = 0) -> None:
        self.tokenizers = TextActors("tokenizer", num_tokenizers, index)
        self.detokenizers = TextActors("detokenizer", num_detokenizers, index)

    @property
    def any_open(self) -> bool:
        """Whether there is one of each."""
        return bool(self.tokenizers.live and self.detokenizers.live)

    def lose(self, names: Iterable[str]) -> None:
        self.tokenizers.lose(names)
        self.detokenizers.lose(names)

    def regain(self, names: Iterable[str]) -> None:
        self.tokenizers.regain(names)
        self.detokenizers.regain(names)

    def track(self, request: Tracked) -> None:
        """Count a request anew, whatever has happened to it."""
        tokenizer, num_unanswered, detokenizer, num_out = request.text_counted
        self.tokenizers.count(tokenizer, -num_unanswered)
        self.detokenizers.count(detokenizer, -num_out)
        tokenizer, detokenizer = request.request.tokenizer, request.request.detokenizer
        request.text_counted = tokenizer, request.num_unanswered, detokenizer, request.num_out
        self.tokenizers.count(tokenizer, request.num_unanswered)
        self.detokenizers.count(detokenizer, request.num_out)

    def choose(self, request: Generate, engine: int) -> Generate:
        """A new request, to be sent to this replica by these."""
        tokenizer, detokenizer = self.tokenizers.choose(), self.detokenizers.choose()
        return msgspec.structs.replace(
            request, engine=engine, tokenizer=tokenizer, detokenizer=detokenizer
        )
