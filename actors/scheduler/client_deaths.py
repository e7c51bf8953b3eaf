"""Which tokenizers may still bring requests of a client that has died.

A client's death is heard twice: from the supervisor, and from each tokenizer (AbortClient), after
all that the client had sent that way. They come in any order. A request of the client that comes
between the two is nobody's, and ends with the second. A tokenizer that dies with its AbortClient
unsaid is heard to the end before its own death is, so that stands for it.

    supervisor's word   a tokenizer's word   the tokenizer's death
    first               second: done         second: what it brought since ends here
    second: done        first                forgotten

A tokenizer that has died, and has said nothing since, may be down: it owes nothing to a client that
dies meanwhile, for its next incarnation is told only of some of those deaths.
"""

from __future__ import annotations

from collections.abc import Iterable


class ClientDeaths:
    """tokenizers: their names."""

    def __init__(self, tokenizers: Iterable[str]) -> None:
        self._tokenizers = tuple(tokenizers)
        self._silent: set[str] = set()  # tokenizers, since their deaths
        # (client, tokenizer): what has come first, until the other does.
        self._lost: set[tuple[int, str]] = set()
        self._aborted: set[tuple[int, str]] = set()

    def heard(self, tokenizer: str) -> None:
        """It has brought a request."""
        self._silent.discard(tokenizer)

    def lost(self, client: int) -> None:
        """The supervisor's word."""
        for tokenizer in self._tokenizers:
            key = client, tokenizer
            if key in self._aborted:
                self._aborted.discard(key)
            elif tokenizer not in self._silent:
                self._lost.add(key)

    def aborted(self, client: int, tokenizer: str) -> None:
        """A tokenizer's word."""
        key = client, tokenizer
        if key in self._lost:
            self._lost.discard(key)
        elif tokenizer not in self._silent:
            self._aborted.add(key)
        self._silent.discard(tokenizer)

    def lost_tokenizer(self, tokenizer: str) -> list[int]:
        """It has died. The clients whose requests end that it has brought."""
        clients = sorted(client for client, owes in self._lost if owes == tokenizer)
        self._lost = {key for key in self._lost if key[1] != tokenizer}
        self._aborted = {key for key in self._aborted if key[1] != tokenizer}
        self._silent.add(tokenizer)
        return clients
