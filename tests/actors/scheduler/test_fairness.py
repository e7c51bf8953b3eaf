"""Nobody starves: how long a request may take, as a bound by what is served before it.

The first in order of all makes as much progress in a step as it would alone. So a request whose
priority none of the others exceeds ends after at most as many steps as those before it in order,
and it itself, would take one after another, each alone. That is so for everyone under fcfs, and
among equals of the highest priority under "priority". The lower ones starve while the higher ones
fill the engine, and are served when they stop to. Running ahead takes nobody longer, but for steps
of lower ones that were in flight already.
"""

import random

import pytest

NUM_STEPS = 250
TIGHT = {"num_gpu_blocks_override": 14, "max_num_batched_tokens": 12, "max_num_seqs": 4}
OPTIONS = {
    "tight": TIGHT,
    "no prefix caching": {**TIGHT, "enable_prefix_caching": False},
    "chunks": {**TIGHT, "long_prefill_token_threshold": 5},
    "one row": {**TIGHT, "max_num_seqs": 1},
    "tiny budget": {**TIGHT, "max_num_batched_tokens": 2},
}


class Load:
    """Requests of one choice, more than the engine can take. It knows how long each may take.

    late: steps that may be in flight and compute nothing for the requests of the bounds.
    """

    def __init__(self, engine, rng, late=0):
        self.engine = engine
        self.rng = rng
        self.chunk = min(
            engine.config.max_num_batched_tokens,
            engine.config.long_prefill_token_threshold or 1 << 30,
        )
        self.late = late
        self.left = {}  # of those that have not ended: the steps they would take alone
        self.bounds = {}  # request: (step before its first, the most steps it may take)
        self.num_steps = 0
        self.latest = 0.0  # the largest share of its bound that a request needed

    def add(self, priority=0, length=None):
        name = f"r{len(self.engine.prompts)}"
        length = length or self.rng.choice([1, 4, 13, 30])
        num_out = self.rng.choice([1, 3, 12])
        prompt = [self.rng.randrange(1000) for _ in range(length)]
        self.engine.add(name, prompt, priority=priority, max_tokens=num_out, ignore_eos=True)
        self.left[name] = -(-length // self.chunk) + num_out - 1
        self.bounds[name] = (self.num_steps, sum(self.left.values()) + self.late)

    def step(self, judged=lambda name: True):
        self.engine.step()
        for name in [name for name in self.left if self.engine.ends[self.engine.stream(name)]]:
            del self.left[name]
            before, most = self.bounds[name]
            if judged(name):
                taken = self.num_steps - before
                assert taken <= most, f"{name} took {taken} steps, and might take {most}"
                self.latest = max(self.latest, taken / most)
        self.num_steps += 1


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_who_comes_first_is_served_first(make_engine, policy, depth, options):
    """Also where all have the same priority."""
    engine = make_engine(scheduling_policy=policy, max_steps_in_flight=depth, **OPTIONS[options])
    load = Load(engine, random.Random(options))
    for _ in range(NUM_STEPS):
        if load.rng.random() < 0.3:
            load.add(priority=7 * (policy == "priority"))
        load.step()
    while load.left:
        load.step()
    engine.assert_idle()
    assert load.latest == 1  # some take as long as they may


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("depth", [1, 2])
def test_the_highest_priority_sees_only_itself(make_engine, depth, options):
    """However many others there are, and whatever they hold."""
    engine = make_engine(
        scheduling_policy="priority", max_steps_in_flight=depth, **OPTIONS[options]
    )
    load = Load(engine, random.Random(options), late=depth - 1)
    urgent = set()
    for _ in range(NUM_STEPS):
        if load.rng.random() < 0.1:
            others = {name: left for name, left in load.left.items() if name not in urgent}
            load.left = {name: left for name, left in load.left.items() if name in urgent}
            urgent.add(f"r{len(engine.prompts)}")
            load.add(priority=-1)
            load.left |= others
        if load.rng.random() < 0.3:
            load.add(priority=load.rng.randrange(3))
        load.step(judged=urgent.__contains__)
    while load.left:
        load.step(judged=urgent.__contains__)
    engine.assert_idle()
    assert len(urgent) > 10
    assert engine.core.statistics()["preemptions"] > 0


def test_lower_priorities_starve_only_as_long_as_higher_ones_come(make_engine):
    engine = make_engine(scheduling_policy="priority", **TIGHT)
    load = Load(engine, random.Random(0))
    for _ in range(5):
        load.add(priority=1)
    for _ in range(300):
        load.add(priority=0, length=13)
        load.step(judged=lambda name: False)
    assert {f"r{i}" for i in range(5)} <= load.left.keys()
    while load.left:
        load.step(judged=lambda name: False)
    engine.assert_idle()
