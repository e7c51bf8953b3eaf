"""Who computes what in the next step.

First come, first served, under three limits: rows (max_num_seqs), tokens of one step
(max_num_batched_tokens) and KV blocks.

1. Running sequences go first, in the order in which they came, each with the tokens it has left to
   compute: one while it decodes, be it known or in flight, more (a chunk of at most
   long_prefill_token_threshold) until its prompt is done. One whose last token is in flight has
   none: no step is ever planned beyond a length that is known before.
2. One that needs a block when none is free takes it from the last to come: forks give up theirs,
   then the last running sequence is preempted. It loses row and blocks and goes to the head of the
   waiting queue, to be computed again from its tokens; its full blocks stay in the prefix cache
   until they're needed. It waits there, and all behind it, for its tokens in flight.
3. Forks enter, each with its last prompt token. A fork that finds no row or budget waits at the
   head of the queue instead.
4. Waiting sequences enter while rows, budget and blocks last. One enters only if all its tokens fit
   at that moment.

No sequence is ever longer than all blocks together (core.py sees to it), so the oldest always gets
on.

Blocks and rows are free for others as soon as their sequence leaves, even while a step that uses
them is in flight. That is safe because the workers execute plans in order: whoever gets them next
gets them in a later plan, which starts when that step has done its last write. And what that step
writes is never shared: a block is registered only when its step's output is back.
"""

from __future__ import annotations

from collections import OrderedDict

from ...mq.config import EngineConfig
from .kv_cache import KVCache
from .sequence import NEVER, Sequence
from .step import Step


class Planner:
    """Owns all sequences that are waiting, forking or running, and the rows."""

    def __init__(self, config: EngineConfig, kv: KVCache) -> None:
        self.waiting: OrderedDict[int, Sequence] = OrderedDict()  # by stream, as are the others
        self.forks: dict[int, Sequence] = {}
        self.running: dict[int, Sequence] = {}
        self.preemptions = self.mixed_steps = self.chunked_prefills = self.num_forks = 0
        self.scheduled_tokens = self.prefix_queries = self.prefix_hits = self.prompt_tokens = 0
        self._kv = kv
        self._budget = config.max_num_batched_tokens
        self._threshold = config.long_prefill_token_threshold or NEVER
        self._free_rows = list(reversed(range(config.max_num_seqs)))
        self._removed: list[int] = []  # since the last plan
        self._number = self._oldest = 0  # the step that is planned, the oldest that is not back

    def add(self, sequence: Sequence) -> None:
        """At the end of the queue. Its tokens are its own from here on."""
        sequence.tokens = sequence.tokens.copy()
        self.waiting[sequence.stream] = sequence

    def fork(self, source: Sequence, siblings: list[Sequence]) -> None:
        """The source has its whole prompt computed: its siblings start from there.

        If it has been preempted meanwhile, its blocks are gone, and they wait as it does.
        """
        waiting = []
        for sibling in siblings:
            sibling.tokens = sibling.tokens.copy()
            sibling.num_cached = source.num_cached
            if source.row >= 0 and self._kv.fork(source, sibling):
                self.forks[sibling.stream] = sibling
            else:
                waiting.append(sibling)
        self._put_first(waiting)

    def remove(self, sequence: Sequence) -> None:
        """The sequence has ended, in whatever state it was."""
        if sequence.row >= 0:
            self._leave(sequence)
        elif self.forks.pop(sequence.stream, None) is None:
            self.waiting.pop(sequence.stream, None)
        self._kv.release(sequence)

    def plan(
        self, number: int, oldest: int, even_empty: bool = False
    ) -> tuple[Step, list[int]] | None:
        """The next step and the rows that leave before it, or None if nothing is to compute.

        oldest: the first step that is not back; `number` itself if none is in flight. even_empty: a
        step that computes nothing will do, too.
        """
        self._number, self._oldest = number, oldest
        step = Step(number)
        budget = self._plan_running(step)
        if self.forks:
            budget = self._plan_forks(step, budget)
        if self.waiting:
            self._plan_waiting(step, budget)
        if not step.sequences and not even_empty:
            return None
        self._count(step)
        removed, self._removed = self._removed, []
        return step, removed

    def _plan_running(self, step: Step) -> int:
        """Returns the budget that is left. A hot loop, so decoding is written out here."""
        budget = self._budget
        sequences, num_tokens = step.sequences, step.num_tokens
        for sequence in list(self.running.values()):
            # Without a row it was preempted for an earlier one, and so were all that come after it.
            if not budget or sequence.row < 0:
                break
            computed = sequence.num_computed
            count = len(sequence.tokens) - computed
            if count <= 1:  # it decodes; with less than 1 its next token is still in flight
                end = computed + 1
                if end >= sequence.max_length:  # and is its last
                    continue
                if end > sequence.capacity and not self._make_room(step, sequence, end):
                    break
                sequence.num_computed = end
                sequences[sequence.row] = sequence
                num_tokens.append(1)
                budget -= 1
            else:
                count = min(count, budget, self._threshold)
                if not self._make_room(step, sequence, computed + count):
                    break
                step.compute(sequence, count)
                budget -= count
        return budget

    def _make_room(self, step: Step, sequence: Sequence, num_tokens: int) -> bool:
        """Blocks for so many tokens, if need be those of the last. False if it is the last."""
        while (grown := self._kv.grow(sequence, num_tokens)) < 0:
            if self.forks:
                _, fork = self.forks.popitem()
                self._kv.release(fork)
                self._put_first([fork])
                continue
            _, last = next(reversed(self.running.items()))
            self._preempt(last)
            if last is sequence:
                return False
        if grown:
            step.appended += [(sequence.row, block) for block in sequence.block_ids[-grown:]]
        return True

    def _plan_forks(self, step: Step, budget: int) -> int:
        late = []
        for fork in self.forks.values():
            if not budget or not self._free_rows:
                late.append(fork)
                continue
            self._enter(step, fork)
            if sources := fork.copy_sources:
                step.copies += zip(sources, fork.block_ids[-len(sources) :], strict=True)
                self._kv.copied(fork)
            step.compute(fork, 1)
            budget -= 1
            self.num_forks += 1
        self.forks.clear()
        for fork in late:
            self._kv.release(fork)
        self._put_first(late)
        return budget

    def _plan_waiting(self, step: Step, budget: int) -> None:
        kv, waiting = self._kv, self.waiting
        while waiting and budget and self._free_rows:
            sequence = next(iter(waiting.values()))
            if sequence.preempted_in > self._oldest or not kv.admit(sequence):
                break
            del waiting[sequence.stream]
            count = min(len(sequence.tokens) - sequence.num_computed, budget, self._threshold)
            grown = kv.grow(sequence, sequence.num_computed + count)
            assert grown >= 0, "admitted without blocks"
            self._count_entry(sequence)
            self._enter(step, sequence)
            step.compute(sequence, count)
            budget -= count

    def _enter(self, step: Step, sequence: Sequence) -> None:
        sequence.row = self._free_rows.pop()
        self.running[sequence.stream] = sequence
        step.enter(sequence)

    def _leave(self, sequence: Sequence) -> None:
        del self.running[sequence.stream]
        self._free_rows.append(sequence.row)
        self._removed.append(sequence.row)
        sequence.row = -1

    def _preempt(self, sequence: Sequence) -> None:
        self.preemptions += 1
        sequence.preempted_in = self._number
        self._leave(sequence)
        self._kv.release(sequence)
        self._put_first([sequence])

    def _put_first(self, sequences: list[Sequence]) -> None:
        for sequence in reversed(sequences):
            self.waiting[sequence.stream] = sequence
            self.waiting.move_to_end(sequence.stream, last=False)

    def _count_entry(self, sequence: Sequence) -> None:
        if sequence.num_cached >= 0:  # it has been here before, or what it forked from has
            return
        sequence.num_cached = min(sequence.num_computed, sequence.num_prompt)
        if sequence.request.counted:  # with another choice that is resumed
            return
        sequence.request.counted = True
        self.prompt_tokens += sequence.num_prompt
        if self._kv.caching:
            self.prefix_queries += sequence.num_prompt
            self.prefix_hits += sequence.num_cached

    def _count(self, step: Step) -> None:
        self.scheduled_tokens += sum(step.num_tokens)
        self.chunked_prefills += len(step.chunks)
        self.mixed_steps += 0 < step.num_prefills < len(step.sequences)
