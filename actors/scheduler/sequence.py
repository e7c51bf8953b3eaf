"""A sequence: one choice of a request, with its tokens and its KV blocks.

    state     where it is found   row    blocks   leaves it
    held      Request.held        -1     no       when the first choice has its first token: with a
                                                  free block -> forking, else -> waiting
    waiting   Planner.waiting     -1     no       when there is a row, budget, blocks -> running
    forking   Planner.forks       -1     yes      in the next plan: if there is a row and budget
                                                  -> running, else -> waiting
    running   Planner.running     >= 0   yes      preempted -> waiting
    ended     nowhere             -1     no

The first choice of a request begins in waiting, and so does every choice that is resumed. A
sequence of any state may end (its last token, StopStream, an abort). The workers know exactly the
running ones, by row.

Running ahead, a sequence may be planned to compute its newest token before that one is back. It has
num_computed >= len(tokens) then: of the tokens computed, those from len(tokens) on are known to the
workers alone, and one more is being sampled.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .request import Request

NEVER = 1 << 62  # a length that no sequence reaches


class Sequence:
    """tokens: prompt, then output; a held sequence has its request's own list, which must not grow.
        The first num_resumed tokens of the output came with the request.
    place: in the order in which sequences are served: (priority of its request, stream). Streams
        are given out in the order in which requests come.
    num_computed: how many have their KV once all plans sent so far are executed.
    max_length, min_length: len(tokens) at which it ends, and below which no stop id ends it.
    num_cached: prompt tokens found in the cache when it (or what it forked from) first entered; -1
        before. Output that was found, too, is not in it.
    scheduled: when it was first given a row; below 0 before.
    preempted_in: the number of the step in whose planning it was preempted last. It enters again
        when all steps before that one are back, as some of its tokens may be in them.
    block_ids: one for each group of layers, then the next of each. 0 where it has none: a sliding
        window doesn't reach so far back any more.
    capacity: tokens that its blocks have room for.
    hashes: of its full blocks, as far as they were asked for. num_registered of them have been
        given to the block pool, and when the output of cache_at computed tokens is back, the next
        one is due.
    copy_sources: while forking, the blocks (referenced) whose copies its last blocks, one for each
        group, are to become; or none.
    """

    __slots__ = (
        "block_ids",
        "cache_at",
        "capacity",
        "choice",
        "copy_sources",
        "ended",
        "hashes",
        "max_length",
        "min_length",
        "num_cached",
        "num_computed",
        "num_prompt",
        "num_registered",
        "num_resumed",
        "place",
        "preempted_in",
        "request",
        "row",
        "scheduled",
        "stop_ids",
        "stream",
        "tokens",
    )

    def __init__(
        self,
        request: Request,
        stream: int,
        choice: int,
        stop_ids: frozenset[int],
        max_length: int,
        resumed: list[int],
    ) -> None:
        self.request = request
        self.stream = stream
        self.place = (request.priority, stream)
        self.choice = choice
        self.stop_ids = stop_ids
        self.tokens = request.prompt + resumed if resumed else request.prompt
        self.num_resumed = len(resumed)
        self.num_prompt = len(request.prompt)
        self.max_length = max_length
        self.min_length = self.num_prompt + request.params.min_tokens
        self.num_computed = 0
        self.num_cached = -1
        self.row = -1
        self.scheduled = -1.0
        self.preempted_in = -1
        self.ended = False
        self.block_ids: list[int] = []
        self.capacity = 0
        self.hashes: list[bytes] = []
        self.num_registered = 0
        self.cache_at = NEVER
        self.copy_sources: list[int] = []

    @property
    def owes_prompt_logprobs(self) -> bool:
        """Whether its prompt is still to be computed for the log-probabilities of its tokens."""
        wanted = self.request.params.prompt_logprobs is not None
        return wanted and not self.choice and not self.num_output

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.num_prompt
