"""Every plan of random loads on tiny engines, against the rules written down plainly.

Requests come, with several choices and priorities, are aborted and stopped. After each flush the
core checks that nothing is lost, and the worker that the plan can be executed.
"""

import random

import pytest
from scheduler_model import Model

from ringcast.mq import codec, messages

TINY = {"num_gpu_blocks_override": 9, "max_num_batched_tokens": 10, "max_num_seqs": 4}
OPTIONS = {
    "tiny": TINY,
    "more rows": {**TINY, "max_num_seqs": 12, "num_gpu_blocks_override": 17},
    "roomy": {"num_gpu_blocks_override": 60, "max_num_batched_tokens": 12},
    "chunks": {**TINY, "long_prefill_token_threshold": 3},
    "few partial": {
        **TINY,
        "max_num_batched_tokens": 14,
        "long_prefill_token_threshold": 4,
        "max_num_partial_prefills": 2,
    },
    "few long": {
        "num_gpu_blocks_override": 30,
        "max_num_batched_tokens": 14,
        "long_prefill_token_threshold": 4,
        "max_num_partial_prefills": 3,
        "max_long_partial_prefills": 1,
    },
    "blocks of one": {**TINY, "block_size": 1, "num_gpu_blocks_override": 34},
    "tiny budget": {**TINY, "max_num_batched_tokens": 2},
    "two stages": {**TINY, "pipeline_parallel_size": 2, "max_num_seqs": 6},
    "three stages": {**TINY, "pipeline_parallel_size": 3, "max_num_batched_tokens": 6},
}


class Run:
    def __init__(self, engine, seed):
        self.engine = engine
        self.rng = random.Random(seed)
        self.priorities = [0] if engine.config.scheduling_policy == "fcfs" else [0, 0, 1, 5]
        self.model = Model(engine.config, engine.core.kv.pool.num_usable)
        self.names = {}  # by row
        self.in_flight = []  # of each plan, `names` as they were then
        self.num_plans = 0

    def act(self):
        rng = self.rng
        if rng.random() < 0.3 and self.engine.core.num_unfinished < 30:
            self.add()
        if rng.random() < 0.03 and self.model.choices:
            self.abort(rng.choice(list(self.model.choices))[0])
        if rng.random() < 0.05:
            self.stop()

    def add(self):
        rng = self.rng
        name = f"r{len(self.engine.prompts)}"
        longest = min(30, self.engine.core.kv.num_slots - 1)
        prompt = [rng.randrange(1000) for _ in range(rng.randrange(1, longest + 1))]
        n, most = rng.choice([1, 1, 2, 5]), rng.choice([1, 2, 7, 25])
        priority = rng.choice(self.priorities)
        self.engine.add(name, prompt, n=n, max_tokens=most, priority=priority, ignore_eos=True)
        self.model.add(name, len(prompt), n, priority, most)

    def abort(self, request):
        self.engine.abort(request)
        self.model.abort(request)

    def stop(self):
        """As after a stop string."""
        speaking = [
            choice
            for choice in self.model.choices.values()
            if choice.length > choice.num_prompt and choice.state == "running"
        ]
        if speaking:
            choice = self.rng.choice(speaking)
            self.engine.stop(self.engine.stream(*choice.name), 1)
            self.model.end(choice.name)

    def step(self):
        self.act()
        depth = self.engine.config.most_steps_in_flight
        if self.in_flight and (depth == 1 or self.rng.random() < 0.9):
            self.answer()
        self.act()
        sends = [send.message for send in self.engine.flush() if send.to == "workers"]
        for plan in sends:
            expected = self.model.plan(self.num_plans, self.num_plans - len(self.in_flight))
            assert self.read(plan) == expected
            self.in_flight.append(self.names.copy())
            self.num_plans += 1
        if len(self.in_flight) < depth:
            oldest = self.num_plans - len(self.in_flight)
            assert self.model.plan(self.num_plans, oldest) is None
        assert self.engine.core.planner.preemptions == self.model.preemptions

    def answer(self):
        names = self.in_flight.pop(0)
        rows = codec.ints(self.engine.outputs[0].rows).tolist()
        self.engine.answer()
        for row in rows:
            self.model.token(names[row])

    def read(self, plan):
        assert isinstance(plan, messages.StepPlan)
        self.names |= {new.row: (new.request_id, new.choice) for new in plan.new}
        rows, num_tokens = codec.ints(plan.rows).tolist(), codec.ints(plan.num_tokens).tolist()
        return [(self.names[row], count) for row, count in zip(rows, num_tokens, strict=True)]


def run(make_engine, policy, depth, options, seed, num_steps):
    fixed = {"scheduling_policy": policy, "max_steps_in_flight": depth}
    engine = make_engine(**fixed, enable_prefix_caching=False, **OPTIONS[options])
    run = Run(engine, f"{policy} {options} {seed}")
    for number in range(num_steps):
        try:
            run.step()
        except Exception as error:
            error.add_note(f"{policy}, depth {depth}, {options}, seed {seed}, step {number}")
            raise
    assert run.num_plans > 0.8 * num_steps
    for request in list(run.model.choices):
        run.abort(request[0])
    engine.run()
    engine.assert_idle()
    return engine.core.statistics()


def check(make_engine, policy, depth, options, seeds, num_steps):
    """Loads that neither fork nor preempt would show little."""
    totals = [run(make_engine, policy, depth, options, seed, num_steps) for seed in seeds]
    assert sum(total["forks"] for total in totals) > 0
    if "max_num_seqs" in OPTIONS[options]:
        assert sum(total["preemptions"] for total in totals) > 0


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_plans_are_the_models(make_engine, policy, depth, options):
    check(make_engine, policy, depth, options, [0], num_steps=300)


@pytest.mark.slow
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_plans_are_the_models_for_long(make_engine, policy, depth, options):
    check(make_engine, policy, depth, options, range(1, 11), num_steps=400)
