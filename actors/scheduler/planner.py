"""Who computes what in the next step.

Sequences are served in their order (order.py: by priority, then first come, first served) under
three limits: rows (max_num_seqs), tokens of one step (max_num_batched_tokens) and KV blocks.

1. Running sequences go first, in order, each with the tokens it has left to compute: one while it
   decodes, be it known or in flight, more (a chunk of at most long_prefill_token_threshold) until
   its prompt is done. One whose last token is in flight has none: no step is ever planned beyond a
   length that is known before.
2. One that needs a block when none is free takes it from the last in order of all that have some: a
   fork, or a running sequence, which may be itself. That is preempted: it loses row and blocks and
   goes back to its place in the waiting queue, to be computed again from its tokens; its full
   blocks stay in the prefix cache until they're needed.
3. Forks enter, each with its last prompt token. A fork that finds no row or budget waits instead.
4. Waiting sequences enter in order while rows, budget and blocks last. One enters only if all its
   tokens fit at that moment, and none of them is in flight any more. Nobody passes the first one,
   but for rule 6.
5. Waiting sequences of a higher priority than some that run go before those in the step, and take
   row and blocks from them, the last first, if with that they can enter. Never from their equals.
6. A prompt is *partial* when a step computes a part of it and leaves a part. With
   max_num_partial_prefills of them in the step, a sequence enters only if all its tokens, cached or
   not, can be computed at once. It is *long* with more tokens than long_prefill_token_threshold.
   With max_long_partial_prefills long ones among the partial, no other long one enters, and shorter
   ones pass it. Only what comes earlier in the step counts: the urgent don't wait for the others.

7. Where workers are a pipeline of stages, each has a step of its own, all at the same time. A
   sequence is in a step only if its next token is known, so while one is in flight that samples it,
   it is in no other. Of those that run, a step lets no more decode than are there for each stage;
   so the steps are of one size, and none takes all rows and leaves the stages behind it without.
   The chunks of a prompt may follow one another.

Nothing starves under fcfs. No sequence is ever longer than all blocks together (core.py sees to
it), so the first in order always gets on, and who waits is passed by others only while long prompts
that came before are being computed: it enters after so many steps as those before it may take. It
is the same among equals under "priority". Lower priorities get what the higher ones leave: they
wait, and lose what they have computed, as long as higher ones come fast enough to fill the engine.

Blocks and rows are free for others as soon as their sequence leaves, even while a step that uses
them is in flight. That is safe because the workers execute plans in order: whoever gets them next
gets them in a later plan, which starts when that step has done its last write. And what that step
writes is never shared: a block is registered only when its step's output is back. Within a plan,
who is preempted has not been planned: it comes later in the order than everybody who has.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable
from itertools import pairwise

from ...mq.config import EngineConfig
from .kv_cache import KVCache
from .order import Ordered, WaitingQueue, place_of, priority_of
from .sequence import NEVER, Sequence
from .step import Step
from .step_sizes import StepSizes


class Planner:
    """Owns all sequences that are waiting, forking or running, and the rows."""

    def __init__(self, config: EngineConfig, kv: KVCache) -> None:
        self.forks = Ordered()
        self.running = Ordered()
        self.preemptions = self.mixed_steps = self.chunked_prefills = self.num_forks = 0
        self.step_sizes = StepSizes()
        self.scheduled_tokens = self.prefix_queries = self.prefix_hits = self.prompt_tokens = 0
        self._kv = kv
        self._budget = config.max_num_batched_tokens
        self._threshold = config.long_prefill_token_threshold or NEVER
        self._max_partial = config.max_num_partial_prefills or NEVER
        self._max_long_partial = config.max_long_partial_prefills or NEVER
        self.waiting = WaitingQueue(self._threshold)
        self._num_rows = config.max_num_seqs
        self._stages = config.pipeline_parallel_size
        self._least_left = 1 if self._stages > 1 else -NEVER  # tokens to compute, to be in a step
        self._decodes_left = NEVER  # in the step that is planned
        self._free_rows = list(reversed(range(self._num_rows)))
        self._removed: list[int] = []  # since the last plan
        self._now = 0.0
        self._number = self._oldest = 0  # the step that is planned, the oldest that is not back

    def add(self, sequence: Sequence) -> None:
        """To its place in the queue. Its tokens are its own from here on."""
        sequence.tokens = sequence.tokens.copy()
        self.waiting.add(sequence)

    def fork(self, source: Sequence, siblings: list[Sequence]) -> None:
        """The source has its whole prompt computed: its siblings start from there.

        If it has been preempted meanwhile, its blocks are gone, and they wait as it does.
        """
        for sibling in siblings:
            sibling.tokens = sibling.tokens.copy()
            sibling.num_cached = source.num_cached
            if source.row >= 0 and self._kv.fork(source, sibling):
                self.forks.add(sibling)
            else:
                self.waiting.add(sibling)

    def remove(self, sequence: Sequence) -> None:
        """The sequence has ended, in whatever state it was."""
        if sequence.row >= 0:
            self._leave(sequence)
        elif sequence in self.forks:
            self.forks.remove(sequence)
        else:
            self.waiting.discard(sequence)
        self._kv.release(sequence)

    def plan(
        self, number: int, oldest: int, even_empty: bool = False, now: float = 0.0
    ) -> tuple[Step, list[int]] | None:
        """The next step and the rows that leave before it, or None if nothing is to compute.

        oldest: the first step that is not back; `number` itself if none is in flight. even_empty: a
        step that computes nothing will do, too.
        """
        self._number, self._oldest, self._now = number, oldest, now
        step = Step(number)
        if self._stages > 1:
            self._decodes_left = -(-len(self.running) // self._stages)
        budget = self._plan_by_priority(step)
        if self.forks:
            budget = self._plan_forks(step, budget)
        if self.waiting:
            self._plan_waiting(step, budget)
        if not step.sequences and not even_empty:
            return None
        self._count(step)
        removed, self._removed = self._removed, []
        return step, removed

    def check(self, in_flight: Iterable[Step]) -> None:
        """Assert that rows and queues are sound, and that these steps, in order, fit to them."""
        self._check_rows()
        self._check_order()
        awaited: Counter[Sequence] = Counter()  # tokens
        for step in in_flight:
            assert sum(step.num_tokens) <= self._budget, "a step is over its budget"
            assert len(step.sequences) == len(step.num_tokens) <= self._num_rows
            assert max(step.num_tokens, default=0) <= self._threshold
            chunks = {sequence for sequence, _ in step.chunks}
            for sequence in step.sequences.values():
                awaited[sequence] += sequence not in chunks
                since = sequence.preempted_in <= step.number
                assert sequence.ended or (sequence.row >= 0) == since, "it runs too early"
        for sequence in self.running:
            ahead = sequence.num_computed - len(sequence.tokens) + 1
            assert awaited[sequence] == max(0, ahead), "it awaits other tokens than it should"
            assert ahead <= 1 or self._stages == 1, "it is computed before its token is known"
            assert sequence.num_computed < sequence.max_length, "it is computed beyond its end"

    def _check_rows(self) -> None:
        """Every row is free or somebody's, and those without one are where they should be."""
        rows = [*self._free_rows, *(sequence.row for sequence in self.running)]
        assert sorted(rows) == list(range(self._num_rows)), "a row is lost, or given out twice"
        removed = self._removed
        assert len(set(removed)) == len(removed), "a row is taken away twice"
        assert set(removed) <= set(self._free_rows), "a row is taken away and somebody's"
        for sequence in self.running:
            assert sequence.block_ids, "it runs without blocks"
            assert not sequence.copy_sources, "its copy is made, and the source held"
        for sequence in self.forks:
            assert sequence.row < 0 < len(sequence.block_ids)
            assert sequence.num_computed == sequence.num_prompt - 1
        for sequence in self.waiting:
            assert sequence.row < 0 == sequence.num_computed
            assert sequence.cache_at == NEVER, "it has no block to register"
            assert sequence.preempted_in <= self._number

    def _check_order(self) -> None:
        for queue in (self.running, self.forks):
            places = [sequence.place for sequence in queue]
            assert all(a < b for a, b in pairwise(places)), "a queue is out of order"
        for sequence in (*self.running, *self.forks, *self.waiting):
            assert not sequence.ended, "it has ended, and is in a queue"

    def _plan_by_priority(self, step: Step) -> int:
        """Running sequences, and before the less urgent of them those that wait (rule 5)."""
        budget, running = self._budget, list(self.running)
        while running and (urgent := self._first_waiting(step)) is not None:
            end = bisect_right(running, priority_of(urgent), key=priority_of)
            budget = self._plan_running(step, budget, running[:end])
            running = running[end:]
            if running:
                before = priority_of(running[0])
                budget = self._plan_waiting(step, budget, before)
                urgent = self._first_waiting(step)
                if urgent is not None and priority_of(urgent) < before:
                    break  # it can't enter
        return self._plan_running(step, budget, running)

    def _plan_running(self, step: Step, budget: int, running: list[Sequence]) -> int:
        """Returns the budget that is left. A hot loop, so decoding is written out here."""
        sequences, num_tokens = step.sequences, step.num_tokens
        least, decodes = self._least_left, self._decodes_left
        for sequence in running:
            # Without a row it was preempted for an earlier one, and so were all that come after it.
            row = sequence.row
            if not budget or row < 0:
                break
            computed = sequence.num_computed
            count = len(sequence.tokens) - computed
            if count <= 1:  # it decodes; with less than 1 its next token is still in flight
                end = computed + 1
                if end >= sequence.max_length:  # and is its last
                    continue
                if count < least or not decodes:
                    continue
                if end > sequence.capacity and not self._make_room(step, sequence, end):
                    break
                sequence.num_computed = end
                sequences[row] = sequence
                num_tokens.append(1)
                budget -= 1
                decodes -= 1
            else:
                count = min(count, budget, self._threshold)
                if not self._make_room(step, sequence, computed + count):
                    break
                step.compute(sequence, count)
                budget -= count
        self._decodes_left = decodes
        return budget

    def _make_room(self, step: Step, sequence: Sequence, num_tokens: int) -> bool:
        """Blocks for so many tokens, if need be those of the last. False if it is the last."""
        while (grown := self._kv.grow(sequence, num_tokens)) < 0:
            if self._preempt_last() is sequence:
                return False
        if grown:
            step.appended += [(sequence.row, block) for block in sequence.block_ids[-grown:]]
        return True

    def _plan_forks(self, step: Step, budget: int) -> int:
        for fork in self.forks:
            if not budget or not self._free_rows:
                self._kv.release(fork)
                self.waiting.add(fork)
                continue
            self._enter(step, fork)
            if sources := fork.copy_sources:
                step.copies += zip(sources, fork.block_ids[-len(sources) :], strict=True)
                self._kv.copied(fork)
            step.compute(fork, 1)
            budget -= 1
            self.num_forks += 1
        self.forks.clear()
        return budget

    def _plan_waiting(self, step: Step, budget: int, before: int | None = None) -> int:
        """Returns the budget that is left.

        before: only those of a higher priority than this. They may preempt.
        """
        while budget and (sequence := self._first_waiting(step)) is not None:
            if before is not None and priority_of(sequence) >= before:
                break
            if sequence.preempted_in > self._oldest:  # some of its tokens may be in flight
                break
            most = min(budget, self._threshold)
            if len(sequence.tokens) > most and len(step.chunks) >= self._max_partial:
                break
            if not self._admit(sequence, preempt=before is not None):
                break
            self.waiting.take(sequence)
            count = min(len(sequence.tokens) - sequence.num_computed, most)
            grown = self._kv.grow(sequence, sequence.num_computed + count)
            assert grown >= 0, "admitted without blocks"
            self._count_entry(sequence)
            self._enter(step, sequence)
            step.compute(sequence, count)
            budget -= count
        return budget

    def _first_waiting(self, step: Step) -> Sequence | None:
        is_long = self.waiting.is_long
        num_long = sum(is_long(sequence) for sequence, _ in step.chunks)
        return self.waiting.first(long_too=num_long < self._max_long_partial)

    def _admit(self, sequence: Sequence, preempt: bool) -> bool:
        """Whether there is a row, and it has been given the cached part of its blocks."""
        if self._free_rows and self._kv.admit(sequence):
            return True
        if not preempt or not self._may_take(sequence):
            return False
        while not (self._free_rows and self._kv.admit(sequence)):
            self._preempt_last()
        return True

    def _may_take(self, sequence: Sequence) -> bool:
        """Whether it could enter in place of those of a lower priority."""
        priority = priority_of(sequence)
        if not self._free_rows and priority_of(self.running.last) <= priority:
            return False
        holders = (*self.running, *self.forks)
        return self._kv.fits_beside(sequence, [s for s in holders if priority_of(s) <= priority])

    def _enter(self, step: Step, sequence: Sequence) -> None:
        sequence.row = self._free_rows.pop()
        if sequence.scheduled < 0:
            sequence.scheduled = self._now
        self.running.add(sequence)
        step.enter(sequence)

    def _leave(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._free_rows.append(sequence.row)
        self._removed.append(sequence.row)
        sequence.row = -1

    def _preempt_last(self) -> Sequence:
        """Take row and blocks from the last in order of all that have blocks; returns it."""
        running, forks = self.running, self.forks
        last = max((holders.last for holders in (running, forks) if holders), key=place_of)
        if last.row < 0:
            forks.remove(last)
        else:
            self.preemptions += 1
            last.preempted_in = self._number
            self._leave(last)
        self._kv.release(last)
        self.waiting.add(last)
        return last

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
        num_tokens = sum(step.num_tokens)
        self.scheduled_tokens += num_tokens
        self.step_sizes.add(num_tokens)
        self.chunked_prefills += len(step.chunks)
        self.mixed_steps += 0 < step.num_prefills < len(step.sequences)
