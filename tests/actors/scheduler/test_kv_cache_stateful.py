"""The KV cache against memory: every slot says what was computed into it, from what, and when.

A slot holds (group of layers, salt, tokens up to its own, the oldest epoch of what it rests on).
Epochs count resets. So a hit that isn't true, a block given back too early, a write into a block
that others share, and anything found of before a reset show as a slot that holds something else
than it should.
"""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ringcast.actors.scheduler.kv_cache import KVCache
from ringcast.actors.scheduler.request import Request
from ringcast.mq import codec, messages
from ringcast.mq.kv_groups import blocks_for, spec_of
from ringcast.mq.sampling_params import SamplingParams

SIZE = 2
LENGTH = 12  # of no sequence is more
CHUNK = 5
GROUPS = [[0], [3], [0, 3], [2, 0, 4], [4, 4, 2]]  # windows, 0 for none


class CacheMachine(RuleBasedStateMachine):
    @initialize(
        windows=st.sampled_from(GROUPS),
        spare=st.integers(0, 8),
        caching=st.sampled_from([True, True, True, False]),
    )
    def start(self, windows, spare, caching):
        specs = [spec_of(window) for window in windows]
        self.windows = windows
        self.kv = KVCache(SIZE, caching, longest_chunk=CHUNK)
        self.kv.open(1 + blocks_for(specs, LENGTH, CHUNK, SIZE) + spare, specs)
        assert self.kv.num_slots >= LENGTH
        self.memory = {}  # by (block, place)
        self.registered = {}  # block -> (group, salt, tokens up to its end)
        self.epoch = 0
        self.waiting = []
        self.running = []

    @precondition(lambda self: len(self.waiting) + len(self.running) < 8)
    @rule(
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=LENGTH - 2),
        n=st.integers(1, 3),
        salt=st.sampled_from(["", "a"]),
    )
    def come(self, prompt, n, salt):
        params = SamplingParams(n=n, seed=0)
        output = messages.OutputSpec(0)
        message = messages.AddRequest("r", 0, codec.pack(prompt), params, output, 0.0, salt)
        for sequence in Request(message, range(n), [2], LENGTH).open.values():
            sequence.tokens = sequence.tokens.copy()
            self.waiting.append(sequence)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data(), chunks=st.integers(0, 4))
    def admit(self, data, chunks):
        sequence = data.draw(st.sampled_from(self.waiting))
        room, expected = self.kv.pool.num_free, self.longest_hit(sequence)
        if not self.kv.admit(sequence):
            assert room * SIZE < (len(sequence.tokens) + SIZE) * len(self.windows)
            assert self.running
            return
        self.enter(sequence)
        assert sequence.num_computed == expected
        self.see(sequence)
        for _ in range(chunks):
            self.compute_chunk(sequence, data)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), chunks=st.integers(1, 6))
    def compute(self, data, chunks):
        sequence = data.draw(st.sampled_from(self.running))
        for _ in range(chunks):
            self.compute_chunk(sequence, data)

    @precondition(lambda self: self.pairs())
    @rule(data=st.data())
    def fork(self, data):
        source, fork = data.draw(st.sampled_from(self.pairs()))
        few = self.kv.pool.num_free < len(self.windows)
        if not self.kv.fork(source, fork):
            assert few or any(self.windows)
            return
        self.enter(fork)
        fresh = fork.block_ids[-len(self.windows) :]
        self.forget(fresh)
        for old, new in zip(fork.copy_sources, fresh, strict=bool(fork.copy_sources)):
            for place in range(SIZE):
                self.memory[new, place] = self.memory.get((old, place))
        self.kv.copied(fork)
        self.see(fork)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), ended=st.booleans())
    def leave(self, data, ended):
        sequence = data.draw(st.sampled_from(self.running))
        self.running.remove(sequence)
        self.kv.release(sequence)
        if not ended:
            self.waiting.append(sequence)

    @precondition(lambda self: self.registered)
    @rule(dice=st.integers(0, 9))
    def reset(self, dice):
        if dice == 9:
            self.kv.reset([*self.running, *self.waiting])
            self.registered.clear()
            self.epoch += 1

    @invariant()
    def agrees(self):
        self.kv.check(self.running)
        pool = self.kv.pool
        found = {block for block in range(pool.num_blocks) if pool._hashes[block] is not None}
        assert found == set(self.registered)

    def compute_chunk(self, sequence, data):
        """Or a decode step with its new token; and its output comes back."""
        if sequence.num_computed == len(sequence.tokens):
            if len(sequence.tokens) == LENGTH:
                return
            sequence.tokens.append(data.draw(st.integers(0, 1)))
        most = data.draw(st.integers(1, CHUNK))
        end = min(sequence.num_computed + most, len(sequence.tokens))
        held = len(sequence.block_ids)
        if self.kv.grow(sequence, end) < 0:
            assert len(self.running) > 1, "it's alone, and doesn't get on"
            return
        self.forget(sequence.block_ids[held:])
        self.see(sequence)
        for place in range(sequence.num_computed, end):
            self.write(sequence, place)
        sequence.num_computed = end
        if end >= sequence.cache_at:
            first = sequence.num_registered
            self.kv.register(sequence, end)
            for i in range(first, end // SIZE):
                for g, block in enumerate(self.column(sequence, i)):
                    content = self.content(sequence, i, g)
                    if block and content not in self.registered.values():
                        self.registered[block] = content

    def pairs(self):
        """Who can fork from whom."""
        return [
            (source, fork)
            for source in self.running
            for fork in self.waiting
            if fork.request is source.request
            and len(fork.tokens) == fork.num_prompt <= source.num_computed
        ]

    def enter(self, sequence):
        self.waiting.remove(sequence)
        self.running.append(sequence)

    def forget(self, blocks):
        """These were given out anew."""
        for block in blocks:
            self.registered.pop(block, None)
            for place in range(SIZE):
                self.memory[block, place] = None

    def column(self, sequence, i):
        """The i-th block of each group."""
        return sequence.block_ids[i * len(self.windows) :][: len(self.windows)]

    def content(self, sequence, i, g):
        return g, sequence.request.salt, tuple(sequence.tokens[: (i + 1) * SIZE])

    def sees(self, place, g):
        """The first place that the token at this one sees in this group."""
        return max(0, place - self.windows[g] + 1) if self.windows[g] else 0

    def longest_hit(self, sequence):
        """Tokens in whole blocks, but for the last token, whose last windows are registered."""
        known = set(self.registered.values())
        for blocks in range((len(sequence.tokens) - 1) // SIZE, 0, -1):
            needed = [
                self.content(sequence, i, g)
                for g in range(len(self.windows))
                for i in range(self.sees(blocks * SIZE, g) // SIZE, blocks)
            ]
            if known.issuperset(needed):
                return blocks * SIZE
        return 0

    def write(self, sequence, place):
        oldest = self.epoch
        for g in range(len(self.windows)):
            if place:  # it sees the one before it
                before = self.column(sequence, (place - 1) // SIZE)[g]
                oldest = min(oldest, self.memory[before, (place - 1) % SIZE][3])
        for g, block in enumerate(self.column(sequence, place // SIZE)):
            assert block, "there is no block to write to"
            assert block not in self.registered, "a block that others may find is written"
            assert self.kv.pool.references(block) == 1, "a block that others use is written"
            tokens = tuple(sequence.tokens[: place + 1])
            self.memory[block, place % SIZE] = g, sequence.request.salt, tokens, oldest

    def see(self, sequence):
        """What its next token finds is what the sequence itself would have computed."""
        end, epochs = sequence.num_computed, set()
        for g in range(len(self.windows)):
            for place in range(self.sees(end, g), end):
                block = self.column(sequence, place // SIZE)[g]
                *found, epoch = self.memory[block, place % SIZE]
                tokens = tuple(sequence.tokens[: place + 1])
                assert found == [g, sequence.request.salt, tokens]
                epochs.add(epoch)
        if sequence.cache_at < 1 << 60:
            assert epochs <= {self.epoch}, "what it registers rests on what was forgotten"


CacheMachine.TestCase.settings = settings(
    max_examples=150, stateful_step_count=50, deadline=None, derandomize=True
)
TestCache = CacheMachine.TestCase
