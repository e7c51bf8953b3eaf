"""What the detokenizer hears at the next flush: openings, tokens, ends, and what passes through."""

from __future__ import annotations

import numpy as np

from ...mq import codec, messages
from .packed import Repacker, packed


class Outbox:
    """The core appends to the lists; `drain` makes messages of them, with one StreamStep."""

    def __init__(self) -> None:
        self._pack_streams = Repacker()
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

    def drain(self) -> list[messages.SchedulerToDetokenizer]:
        out: list[messages.SchedulerToDetokenizer] = [*self.opens]
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
