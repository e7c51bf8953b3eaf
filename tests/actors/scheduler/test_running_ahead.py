"""Steps that are planned before the ones they build on are back: the same tokens, whatever ends
late, and no more waste than the steps in flight.
"""

import random

import pytest

from ringcast.actors.scheduler.sequence import NEVER
from ringcast.mq import codec


def rows_of(plan):
    return dict(
        zip(codec.ints(plan.rows).tolist(), codec.ints(plan.num_tokens).tolist(), strict=True)
    )


def entries(engine, request_id):
    """(step, known tokens) of every time that it entered."""
    return [
        (plan.step, codec.ints(new.token_ids).tolist())
        for plan in engine.plans
        for new in plan.new
        if new.request_id == request_id
    ]


def test_a_decode_is_planned_while_its_token_is_in_flight(make_engine):
    engine = make_engine(max_steps_in_flight=3)
    engine.add("a", range(10))
    engine.flush()
    assert [rows_of(plan) for plan in engine.plans] == [{0: 10}, {0: 1}, {0: 1}]
    engine.add("b", range(100, 110))
    engine.flush()
    assert len(engine.plans) == 3
    engine.answer()
    engine.flush()
    assert rows_of(engine.plans[3]) == {0: 1, 1: 10}
    engine.run()
    engine.assert_idle()
    assert engine.output("a") == engine.expected("a")


def test_the_decode_follows_the_last_chunk_at_once(make_engine):
    engine = make_engine(max_steps_in_flight=4, long_prefill_token_threshold=4)
    engine.add("a", range(10))
    engine.flush()
    assert [rows_of(plan) for plan in engine.plans] == [{0: 4}, {0: 4}, {0: 2}, {0: 1}]
    engine.run()
    engine.assert_idle()


@pytest.mark.parametrize("ahead", [1, 2, 3])
def test_no_step_is_planned_beyond_a_length_that_is_known(make_engine, model_spec, ahead):
    engine = make_engine(max_steps_in_flight=ahead, spec=model_spec(max_model_len=12))
    engine.add("max_tokens", range(5), max_tokens=4)
    engine.run()
    assert len(engine.plans) == 4
    engine.add("context", range(5), max_tokens=None)
    engine.run()
    assert len(engine.plans) == 4 + 7
    engine.assert_idle()
    tight = make_engine(max_steps_in_flight=ahead, num_gpu_blocks_override=4)  # 12 slots
    tight.add("blocks", range(5), max_tokens=None)
    tight.run()
    assert len(tight.plans) == 8
    tight.assert_idle()
    for one in (engine, tight):
        statistics = one.core.statistics()
        assert statistics["overshoot_tokens"] == statistics["preemptions"] == 0


@pytest.mark.parametrize("ahead", [1, 2, 3])
def test_a_stop_token_costs_the_steps_in_flight(make_engine, ahead):
    engine = make_engine()
    engine.add("a", range(5))
    stop = engine.expected("a")[3]
    engine = make_engine(max_steps_in_flight=ahead)
    engine.add("a", range(5), max_tokens=100, stop_token_ids=[stop])
    engine.run()
    engine.assert_idle()
    end = engine.end("a")
    assert (end.reason, end.num_tokens, end.stop_reason) == ("stop", 4, stop)
    assert len(engine.plans) == 4 + ahead - 1
    statistics = engine.core.statistics()
    assert statistics["overshoot_tokens"] == ahead - 1
    assert statistics["generation_tokens"] == 4


def test_a_stop_string_costs_what_it_cuts_off_too(make_engine):
    engine = make_engine(max_steps_in_flight=3)
    engine.add("a", range(5), max_tokens=100)
    for _ in range(6):
        engine.step()
    assert len(engine.tokens[engine.stream("a")]) == 5
    engine.stop(engine.stream("a"), 3)
    assert engine.core.statistics()["free_blocks"] == 1023
    engine.run()
    engine.assert_idle()
    assert (engine.end("a").reason, engine.end("a").num_tokens) == ("stop", 3)
    assert engine.core.statistics()["overshoot_tokens"] == 2 + 3


def test_an_abort_frees_at_once_and_drops_what_is_in_flight(make_engine):
    engine = make_engine(max_steps_in_flight=3)
    engine.add("a", range(30), max_tokens=100)
    for _ in range(4):
        engine.step()
    num_tokens = len(engine.tokens[engine.stream("a")])
    engine.abort("a")
    assert engine.core.statistics()["free_blocks"] == 1023
    engine.add("b", range(100, 130))  # takes row and blocks while "a" has steps in flight
    engine.run()
    engine.assert_idle()
    assert (engine.end("a").reason, engine.end("a").num_tokens) == ("abort", num_tokens)
    assert [new.row for plan in engine.plans for new in plan.new] == [0, 0]
    assert engine.output("b") == engine.expected("b")
    assert engine.core.statistics()["overshoot_tokens"] == 3


def preempting(make_engine, **params):
    """In step 1 "b" finds no block, with step 0 in flight. "a" has one more token then."""
    engine = make_engine(num_gpu_blocks_override=5, max_steps_in_flight=3)  # 4 blocks
    engine.add("a", range(4), max_tokens=2)
    engine.add("b", range(20, 28), **params)
    engine.flush()
    assert engine.core.statistics()["preemptions"] == 1
    return engine


def test_a_preempted_sequence_waits_for_its_tokens(make_engine):
    engine = preempting(make_engine)
    # There is room for its prompt, and a third step may be sent; but its first token is not here.
    assert engine.core.statistics()["free_blocks"] == 2
    assert len(engine.plans) == 2
    for _ in range(2):
        engine.answer()
        engine.flush()
    first = engine.expected("b")[0]
    assert engine.tokens[engine.stream("b")] == [first]
    assert entries(engine, "b") == [(0, [*range(20, 28)]), (2, [*range(20, 28), first])]
    engine.run()
    engine.assert_idle()
    assert engine.output("b") == engine.expected("b")
    assert engine.core.statistics()["overshoot_tokens"] == 0


def test_a_preempted_sequence_may_end_by_what_is_in_flight(make_engine):
    engine = make_engine()
    engine.add("b", range(20, 28))
    stop = engine.expected("b")[0]
    engine = preempting(make_engine, stop_token_ids=[stop])
    engine.run()
    engine.assert_idle()
    assert (engine.end("b").reason, engine.end("b").num_tokens) == ("stop", 1)
    assert len(entries(engine, "b")) == 1


@pytest.mark.parametrize("ended", ["abort", "stop"])
def test_a_preempted_sequence_may_be_ended_with_tokens_in_flight(make_engine, ended):
    engine = preempting(make_engine)
    if ended == "abort":
        engine.abort("b")
    else:
        engine.stop(engine.stream("b"), 0)
    engine.run()
    engine.assert_idle()
    assert (engine.end("b").reason, engine.end("b").num_tokens) == (ended, 0)
    assert engine.core.statistics()["overshoot_tokens"] == 1


def test_choices_of_a_source_that_was_preempted_enter_by_themselves(make_engine):
    engine = preempting(make_engine, n=3)
    engine.run()
    engine.assert_idle()
    for choice in range(3):
        assert engine.output("b", choice) == engine.expected("b", choice)


def test_a_block_is_shared_when_its_step_is_back(make_engine):
    engine = make_engine(max_steps_in_flight=2)
    engine.add("a", range(9), max_tokens=1)
    engine.flush()
    engine.add("b", range(9), max_tokens=1)
    engine.flush()
    engine.answer()
    engine.add("c", range(9), max_tokens=1)
    engine.flush()
    computed = [new.num_computed_tokens for plan in engine.plans for new in plan.new]
    assert computed == [0, 0, 8]
    engine.run()
    engine.assert_idle()


def test_a_chunk_of_blocks_that_are_gone_is_not_shared(make_engine):
    """Step 0 computes a chunk of "b", which has no blocks any more when its output comes."""
    engine = make_engine(
        num_gpu_blocks_override=5, max_steps_in_flight=2, max_num_batched_tokens=12
    )
    engine.add("a", range(4), max_tokens=6)
    engine.add("b", range(20, 32), max_tokens=2)  # 8 of 12 tokens fit into the budget
    engine.flush()
    assert engine.core.statistics()["preemptions"] == 1
    engine.answer()
    engine.core.check()
    engine.run()
    engine.assert_idle()
    assert engine.output("b") == engine.expected("b", num_tokens=2)


class Load:
    """Random requests whose outcome depends on nothing but their own tokens, and some aborts.

    What is drawn for a request comes from its own name. So is when a stop string is found, which is
    told some rounds late.
    """

    def __init__(self, engine, seed, num_requests):
        self.engine = engine
        self.rng = random.Random(f"{seed} rounds")
        self.seed = seed
        self.left = num_requests
        self.stops = {}  # by stream: after so many tokens
        self.untold = set()  # of those
        self.aborted = set()
        self.stems = [[self.rng.randrange(1000) for _ in range(24)] for _ in range(2)]

    def act(self):
        if self.left and self.rng.random() < 0.5:
            self.left -= 1
            self.add(f"r{self.left}")
        if self.rng.random() < 0.04:
            self.abort()
        for stream in sorted(self.untold):
            found = len(self.engine.tokens[stream]) >= self.stops[stream]
            if found and self.rng.random() < 0.5:
                self.untold.remove(stream)
                self.engine.stop(stream, self.stops[stream])

    def add(self, name):
        rng = random.Random(f"{self.seed} {name}")
        stem = rng.choice(self.stems)[: rng.randrange(24)]
        prompt = stem + [rng.randrange(1000) for _ in range(rng.randrange(1, 8))]
        n = rng.choice([1, 1, 1, 2, 4])
        self.engine.add(
            name,
            prompt,
            n=n,
            max_tokens=rng.choice([1, 2, 5, 12, 30, None]),
            min_tokens=rng.choice([0, 0, 1]),
            stop_token_ids=rng.sample(range(250, 1000), 10),
            ignore_eos=rng.random() < 0.5,
            logprobs=rng.choice([None, 0, 2]),
        )
        self.engine.flush()
        for choice in range(n):
            if rng.random() < 0.3:
                stream = self.engine.stream(name, choice)
                self.stops[stream] = rng.randrange(1, 12)
                self.untold.add(stream)

    def abort(self):
        running = sorted({m.request_id for s, m in self.engine.opened.items() if not self.ended(s)})
        if running:
            name = self.rng.choice(running)
            self.aborted.add(name)
            self.engine.abort(name)

    def ended(self, stream):
        return bool(self.engine.ends[stream])

    def run(self):
        engine = self.engine
        while self.left or engine.core.num_unfinished or engine.outputs:
            self.act()
            if engine.outputs and self.rng.random() < 0.8:
                engine.answer()
            if self.rng.random() < 0.3:
                self.act()
            engine.flush()
        engine.assert_idle()

    def outcome(self):
        """By request and choice: its tokens, and why it ended.

        As the detokenizer says it, for whom a stop string comes first, if it was told in time or
        not.
        """
        out = {}
        for stream, opened in self.engine.opened.items():
            (end,) = self.engine.ends[stream]
            tokens = self.engine.tokens[stream][: end.num_tokens]
            ending = end.reason, end.stop_reason
            if len(tokens) >= self.stops.get(stream, NEVER):
                tokens, ending = tokens[: self.stops[stream]], ("stop", "a string")
            out[opened.request_id, opened.choice] = (tokens, *ending)
        return out


TIGHT = {"num_gpu_blocks_override": 16, "max_num_batched_tokens": 24}


@pytest.mark.parametrize(
    "options",
    [
        {},
        TIGHT,
        {**TIGHT, "enable_prefix_caching": False},
        {**TIGHT, "long_prefill_token_threshold": 3},
        {"num_gpu_blocks_override": 14, "block_size": 3, "max_num_seqs": 5},
    ],
    ids=str,
)
def test_every_depth_gives_the_same_tokens(make_engine, model_spec, options):
    spec = model_spec(max_model_len=38, eos_token_ids=[2, *range(300, 320)])
    totals = {}
    for seed in range(4):
        outcomes, aborted = [], set()
        for ahead in (1, 2, 3):
            load = Load(make_engine(spec=spec, max_steps_in_flight=ahead, **options), seed, 30)
            load.run()
            outcomes.append(load.outcome())
            aborted |= load.aborted
            for name, value in load.engine.core.statistics().items():
                totals[ahead, name] = totals.get((ahead, name), 0) + value
        first, *others = outcomes
        assert {reason for _, reason, _ in first.values()} == {"stop", "length", "abort"}
        for other in others:
            assert first.keys() == other.keys()
            for key in first:
                if key[0] not in aborted:
                    assert first[key] == other[key], key
    assert totals[3, "overshoot_tokens"] > totals[2, "overshoot_tokens"] > 50
    for ahead in (1, 2, 3):
        assert totals[ahead, "forks"] > 0
        if options:
            assert totals[ahead, "preemptions"] > 10
