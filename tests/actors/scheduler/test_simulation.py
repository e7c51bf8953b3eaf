"""Thousands of random steps on engines too small for their load.

After every flush the core checks itself and the worker has checked the plan; at the end each
stream has ended once, with exactly the tokens that it would have had alone, and nothing is held.
"""

import random

import pytest


class Client:
    """Random requests, aborts, stops and repetitions. Prompts begin alike, some with a salt."""

    def __init__(self, engine, rng, num_requests):
        self.engine = engine
        self.rng = rng
        self.left = num_requests
        self.urgent = engine.config.scheduling_policy == "priority"
        self.sent = []  # (request id, incarnation)
        self.longest = min(engine.core.kv.num_slots - 1, 40)
        self.stems = [[rng.randrange(1000) for _ in range(self.longest)] for _ in range(3)]

    def act(self):
        rng = self.rng
        if self.left and rng.random() < 0.4:
            self.left -= 1
            self.add(f"r{self.left}", 0)
        if self.sent and rng.random() < 0.04:
            self.engine.abort(*rng.choice(self.sent))
        if self.sent and rng.random() < 0.02:
            self.repeat()
        if rng.random() < 0.06:
            self.stop()

    def add(self, request_id, incarnation):
        rng = self.rng
        stem = rng.choice(self.stems)[: rng.randrange(self.longest)]
        tail = [rng.randrange(1000) for _ in range(rng.randrange(1, 8))]
        self.engine.add(
            request_id,
            (stem + tail)[: self.longest],
            incarnation=incarnation,
            cache_salt=rng.choice(["", "", "salt"]),
            n=rng.choice([1, 1, 1, 2, 3, 6]),
            max_tokens=rng.choice([1, 2, 5, 12, 30, None]),
            min_tokens=rng.choice([0, 0, 1]),
            stop_token_ids=rng.sample(range(250, 1000), 10),
            priority=rng.choice([0, 1, 1, 4]) if self.urgent else 0,
        )
        self.sent.append((request_id, incarnation))

    def repeat(self):
        """A request comes again, with the next incarnation; the old one is aborted."""
        request_id, incarnation = self.rng.choice(self.sent)
        if (request_id, incarnation + 1) in self.sent:
            return
        streams = self.engine.opened.items()
        old = {s for s, m in streams if (m.request_id, m.incarnation) == (request_id, incarnation)}
        if old:
            self.add(request_id, incarnation + 1)

    def stop(self):
        """As after a stop string: some of the tokens that the detokenizer has seen are enough."""
        tokens = self.engine.tokens
        speaking = sorted(s for s in tokens if tokens[s] and not self.engine.ends[s])
        if speaking:
            stream = self.rng.choice(speaking)
            self.engine.stop(stream, self.rng.randrange(1, len(tokens[stream]) + 1))


TIGHT = {"num_gpu_blocks_override": 14, "max_num_batched_tokens": 24}
OPTIONS = {
    "roomy": {},
    "tight": TIGHT,
    "tight, ahead": {**TIGHT, "max_steps_in_flight": 3},
    "tight, no prefix caching": {**TIGHT, "enable_prefix_caching": False},
    "tight, tiny budget": {**TIGHT, "max_num_batched_tokens": 3},
    "tiny": {"num_gpu_blocks_override": 6, "block_size": 3, "max_num_seqs": 5},
    "blocks of one": {"num_gpu_blocks_override": 40, "block_size": 1},
    "short chunks": {**TIGHT, "long_prefill_token_threshold": 4, "max_steps_in_flight": 2},
    "one row": {**TIGHT, "max_num_seqs": 1},
    "tight, priorities": {**TIGHT, "scheduling_policy": "priority"},
    "tight, priorities, ahead, few partial": {
        **TIGHT,
        "scheduling_policy": "priority",
        "max_steps_in_flight": 2,
        "long_prefill_token_threshold": 6,
        "max_num_partial_prefills": 2,
        "max_long_partial_prefills": 1,
    },
    "tight, windows": {**TIGHT, "num_gpu_blocks_override": 40},
    "tight, windows, ahead": {**TIGHT, "num_gpu_blocks_override": 32, "max_steps_in_flight": 3},
    "tight, one window": {**TIGHT, "max_num_batched_tokens": 7},
    "tight, windows, priorities, ahead": {
        **TIGHT,
        "num_gpu_blocks_override": 32,
        "scheduling_policy": "priority",
        "max_steps_in_flight": 2,
    },
}
# Of the groups of layers, 0 for none.
WINDOWS = {
    "tight, windows": [0, 6, 6],
    "tight, windows, ahead": [9, 0, 5],
    "tight, one window": [13],
    "tight, windows, priorities, ahead": [0, 6, 6],
}


def check_end(engine, stream):
    """What the core itself found (not a stop string or an abort) is the first place to end."""
    opened, (end,) = engine.opened[stream], engine.ends[stream]
    params, tokens = opened.params, engine.tokens[stream][: end.num_tokens]
    stops = [
        i + 1
        for i, token in enumerate(tokens)
        if token in params.stop_token_ids and i + 1 >= params.min_tokens
    ]
    limits = [engine.spec.max_model_len, engine.core.kv.num_slots + 1]
    longest = min(limits) - opened.num_prompt_tokens
    if params.max_tokens is not None:
        longest = min(longest, params.max_tokens)
    assert end.num_tokens <= longest
    if end.reason == "length":
        assert (stops, end.num_tokens) == ([], longest)
    elif end.stop_reason is not None:
        assert (stops, tokens[-1]) == ([end.num_tokens], end.stop_reason)
    else:
        assert end.reason in ("abort", "stop")
    return end.reason


def simulate(engine, seed, num_requests):
    rng = random.Random(seed)
    client = Client(engine, rng, num_requests)
    while client.left or engine.core.num_unfinished or engine.outputs:
        client.act()
        if engine.outputs and rng.random() < 0.8:
            engine.answer()
        if rng.random() < 0.3:
            client.act()  # between a step's output and the next plan
        engine.flush()
    engine.flush()
    engine.assert_idle()
    return {check_end(engine, stream) for stream in engine.ends if engine.ends[stream]}


@pytest.mark.parametrize("options", OPTIONS)
def test_simulation(make_engine, model_spec, options):
    total = {}
    for seed in range(3):
        windows = WINDOWS.get(options, [0])
        spec = model_spec(max_model_len=60, hf_config={"windows": windows})
        engine = make_engine(spec=spec, **OPTIONS[options])
        reasons = simulate(engine, f"{options} {seed}", num_requests=40)
        assert reasons == {"stop", "length", "abort"}
        for name, value in engine.core.statistics().items():
            total[name] = total.get(name, 0) + value
    assert total["steps"] > 200
    assert total["generation_tokens"] > 500
    if options.startswith("tight") or options in ("tiny", "blocks of one", "short chunks"):
        assert total["preemptions"] > 0
        assert total["chunked_prefills"] > 0 or options in ("tiny", "blocks of one")
    if options != "one row":
        assert total["forks"] > 0
        assert total["mixed_steps"] > 0
    assert (total["prefix_cache_hits"] > 0) == (options != "tight, no prefix caching")
