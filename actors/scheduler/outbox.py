"""What detokenizers hear at the next flush: openings, tokens, ends, and what passes through.

All that the core notes is in one list of each kind, whichever detokenizer it is for; it is dealt
out when it goes. Of D detokenizers, stream s is number s % D's.
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from ...mq import codec, messages
from .packed import Repacker, packed

S = TypeVar("S", messages.OpenStream, messages.StreamEnd)
T = TypeVar("T")
Told = list[messages.SchedulerToDetokenizer]


class Outbox:
    """The core appends to the lists; `drain` makes messages of them, with one StreamStep for each
    detokenizer that has anything in it."""

    def __init__(self, num_detokenizers: int = 1) -> None:
        self._parts = [Outbox() for _ in range(num_detokenizers)] if num_detokenizers > 1 else []
        self._pack_streams = Repacker("q")
        self._clear()

    def add_logprobs(
        self, logprobs: messages.TokenLogprobs, rows: list[int], dropped: set[int], first: int
    ) -> None:
        """`logprobs` of a StepOutput with `rows`. The first row not dropped is at `first` here."""
        kept = np.array([row not in dropped for row in rows], dtype=bool)
        place = first + np.cumsum(kept, dtype=np.int32) - 1
        index = codec.ints(logprobs.index)
        wanted = kept[index]
        if not wanted.any():
            return
        shape = (len(index), logprobs.width)
        self._logprobs.append(
            messages.TokenLogprobs(
                width=logprobs.width,
                index=codec.pack(place[index][wanted]),
                token_ids=codec.ints(logprobs.token_ids).reshape(shape)[wanted].tobytes(),
                logprobs=codec.floats(logprobs.logprobs).reshape(shape)[wanted].tobytes(),
                rank=codec.ints(logprobs.rank)[wanted].tobytes(),
            )
        )

    def add_prompt_logprobs(self, stream: int, part: messages.PromptLogprobs) -> None:
        self._prompt_logprobs.append(messages.PromptLogprobs(stream, part.first, part.logprobs))

    def drain(self) -> list[Told]:
        """What is to be told to each detokenizer."""
        if not self._parts:
            return [self._drain()]
        self._deal()
        told = [part._drain() for part in self._parts]
        if any(told):
            self._clear()
        return told

    def _deal(self) -> None:
        """Give each part what is its own of all that is here."""
        streams = np.array(self.streams, np.int64)
        index, ids = (np.array(values) for values in (self.token_index, self.token_ids))
        logprobs = _joined(self._logprobs)
        for number, part in enumerate(self._parts):
            mine = streams % len(self._parts) == number
            part.streams, part.token_index, part.token_ids = (
                values[mine].tolist() for values in (streams, index, ids)
            )
            part._logprobs = _chosen(logprobs, mine)
            part.opens = self._of(number, self.opens)
            part.ends = self._of(number, self.ends)
            part._prompt_logprobs = [
                one for one in self._prompt_logprobs if one.of % len(self._parts) == number
            ]
            part.cached = self._pairs_of(number, self.cached)
            part.timings = self._pairs_of(number, self.timings)
            part.pooled = self._pairs_of(number, self.pooled)
            part.pings = [ping for ping in self.pings if ping.detokenizer == number]
            part.resets = [reset for reset in self.resets if reset.detokenizer == number]
            part.gone_heard = self.gone_heard

    def _of(self, number: int, items: list[S]) -> list[S]:
        return [item for item in items if item.stream % len(self._parts) == number]

    def _pairs_of(self, number: int, pairs: list[tuple[int, T]]) -> list[tuple[int, T]]:
        return [pair for pair in pairs if pair[0] % len(self._parts) == number]

    def _drain(self) -> Told:
        out: Told = [*self.opens]
        if self.streams or self.ends or self._prompt_logprobs:
            out.append(
                messages.StreamStep(
                    streams=self._pack_streams(self.streams),
                    token_index=packed(self.token_index),
                    token_ids=packed(self.token_ids),
                    ends=self.ends,
                    cached=self.cached,
                    logprobs=_joined(self._logprobs),
                    prompt_logprobs=self._prompt_logprobs,
                    timings=self.timings,
                    pooled=self.pooled,
                )
            )
        out += self.pings
        out += self.resets
        out += self.gone_heard
        if out:
            self._clear()
        return out

    def _clear(self) -> None:
        self.opens: list[messages.OpenStream] = []
        self.streams: list[int] = []
        self.token_index: list[int] = []
        self.token_ids: list[int] = []
        self.ends: list[messages.StreamEnd] = []
        self.cached: list[tuple[int, int]] = []
        self.timings: list[tuple[int, messages.Timing]] = []
        self.pooled: list[tuple[int, bytes]] = []
        self.pings: list[messages.Ping] = []
        self.resets: list[messages.ResetPrefixCache] = []
        self.gone_heard: list[messages.PeersGoneHeard] = []
        self._logprobs: list[messages.TokenLogprobs] = []
        self._prompt_logprobs: list[messages.PromptLogprobs] = []


def _chosen(
    logprobs: messages.TokenLogprobs | None, mine: NDArray[np.bool_]
) -> list[messages.TokenLogprobs]:
    """Those of some of a step's tokens, with the places that these have among themselves."""
    if logprobs is None:
        return []
    index = codec.ints(logprobs.index)
    wanted = mine[index]
    if not wanted.any():
        return []
    shape = (len(index), logprobs.width)
    return [
        messages.TokenLogprobs(
            width=logprobs.width,
            index=codec.pack((np.cumsum(mine) - 1)[index][wanted]),
            token_ids=codec.ints(logprobs.token_ids).reshape(shape)[wanted].tobytes(),
            logprobs=codec.floats(logprobs.logprobs).reshape(shape)[wanted].tobytes(),
            rank=codec.ints(logprobs.rank)[wanted].tobytes(),
        )
    ]


def _joined(parts: list[messages.TokenLogprobs]) -> messages.TokenLogprobs | None:
    """Of several steps, as wide as the widest."""
    if len(parts) < 2:
        return parts[0] if parts else None
    width = max(part.width for part in parts)
    ids, values = [], []
    for part in parts:
        padding = ((0, 0), (0, width - part.width))
        shape = (-1, part.width)
        part_ids = codec.ints(part.token_ids).reshape(shape)
        part_values = codec.floats(part.logprobs).reshape(shape)
        ids.append(np.pad(part_ids, padding, constant_values=-1).tobytes())
        values.append(np.pad(part_values, padding, constant_values=-np.inf).tobytes())
    return messages.TokenLogprobs(
        width=width,
        index=b"".join(part.index for part in parts),
        token_ids=b"".join(ids),
        logprobs=b"".join(values),
        rank=b"".join(part.rank for part in parts),
    )
