"""Log-probabilities, row by row: one output token, and the likeliest there were in its place."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from ...mq import codec
from ...mq.messages import TokenLogprobs


class LogprobRow(NamedTuple):
    """place: of the token in its choice's output. The lists begin with the token itself, then the
    likeliest.

    texts: the bytes of each token; None where the id is -1 (there was none).
    """

    place: int
    rank: int
    token_ids: list[int]
    logprobs: list[float]
    texts: list[bytes | None]


class StepLogprobs:
    """A step's log-probabilities, to be looked up by place in the step's arrays."""

    def __init__(self, logprobs: TokenLogprobs) -> None:
        self._width = logprobs.width
        self._rows = {place: row for row, place in enumerate(codec.ints(logprobs.index).tolist())}
        self._token_ids: list[int] = codec.ints(logprobs.token_ids).tolist()
        self._logprobs: list[float] = codec.floats(logprobs.logprobs).tolist()
        self._rank: list[int] = codec.ints(logprobs.rank).tolist()

    @property
    def num_rows(self) -> int:
        return len(self._rows)

    def row(
        self, at: int, place: int, num_likeliest: int, bytes_of: Callable[[int], bytes]
    ) -> LogprobRow | None:
        """The row of the token at `at` in the step, which is at `place` in its choice's output."""
        row = self._rows.get(at)
        if row is None:
            return None
        begin = row * self._width
        columns = slice(begin, begin + min(self._width, num_likeliest + 1))
        ids = self._token_ids[columns]
        return LogprobRow(
            place,
            self._rank[row],
            ids,
            self._logprobs[columns],
            [bytes_of(i) if i >= 0 else None for i in ids],
        )


def token_id_name(token_id: int) -> bytes:
    """vLLM's name of a token where texts would not do (return_tokens_as_token_ids)."""
    return b"token_id:%d" % token_id


def pack_rows(
    rows: Sequence[LogprobRow], first_place: int
) -> tuple[TokenLogprobs, list[bytes | None]]:
    """`logprobs` and `logprob_tokens` of a `Chunk` whose first token is at `first_place`."""
    width = max(len(row.token_ids) for row in rows)
    token_ids: list[int] = []
    logprobs: list[float] = []
    texts: list[bytes | None] = []
    for row in rows:
        missing = width - len(row.token_ids)
        token_ids += row.token_ids + [-1] * missing
        logprobs += row.logprobs + [-math.inf] * missing
        texts += row.texts + [None] * missing
    packed = TokenLogprobs(
        width=width,
        index=_pack("i", [row.place - first_place for row in rows]),
        token_ids=_pack("i", token_ids),
        logprobs=_pack("f", logprobs),
        rank=_pack("i", [row.rank for row in rows]),
    )
    return packed, texts


def unpack_rows(
    logprobs: TokenLogprobs, texts: Sequence[bytes | None], first_place: int = 0
) -> list[LogprobRow]:
    """The rows of a `Chunk`: its `logprobs`, `logprob_tokens` and `first_index`."""
    return list(_unpack(logprobs, texts, first_place))


def _unpack(
    logprobs: TokenLogprobs, texts: Sequence[bytes | None], first_place: int
) -> Iterator[LogprobRow]:
    width = logprobs.width
    token_ids = codec.ints(logprobs.token_ids).tolist()
    values = codec.floats(logprobs.logprobs).tolist()
    places = codec.ints(logprobs.index).tolist()
    for i, (place, rank) in enumerate(zip(places, codec.ints(logprobs.rank).tolist(), strict=True)):
        row = slice(i * width, (i + 1) * width)
        yield LogprobRow(first_place + place, rank, token_ids[row], values[row], list(texts[row]))


def _pack(kind: str, values: Sequence[float]) -> bytes:
    # A chunk's arrays are short: numpy's set-up would take far longer than this.
    return struct.pack(f"<{len(values)}{kind}", *values)
