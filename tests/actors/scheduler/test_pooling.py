"""The scheduler of a pooling model: whole prompts, in order, each answered once."""

from __future__ import annotations

import random

import numpy as np
import pytest

from ringcast.actors.core import PeerLost
from ringcast.actors.scheduler.pooling import PoolingCore
from ringcast.mq import codec, messages
from ringcast.mq.config import EngineConfig, ModelSpec, PoolingSpec
from ringcast.mq.sampling_params import SamplingParams

LONGEST = 16
NOTHING = SamplingParams(max_tokens=1, seed=0)


def vector_of(ids):
    return [float(sum(ids)), float(len(ids))]


class Engine:
    """Drives one core. `vectors` and `ends` are what the detokenizer heard, by stream."""

    def __init__(self, ready=True, **options):
        defaults = {"device": "cpu", "max_num_seqs": 4, "max_num_batched_tokens": LONGEST}
        self.config = EngineConfig(**{**defaults, **options})
        spec = ModelSpec(
            name="encoder",
            path="",
            tokenizer_path="",
            architecture="BertModel",
            vocab_size=100,
            max_model_len=LONGEST,
            eos_token_ids=[],
            hf_config={},
            pooling=PoolingSpec(kind="mean", normalize=True, dimension=2),
        )
        self.core = PoolingCore(self.config, spec)
        self.plans, self.pings, self.resets = [], [], []
        self.opened, self.vectors, self.ends = {}, {}, {}
        self.prompts = {}
        self.rows = {}  # of the worker: token ids by row
        self.steps = []  # request ids, by step
        self.waiting = []  # plans that the worker has not executed
        self.now = 0.0
        if ready:
            self.get_ready()

    def get_ready(self):
        self.core.handle("worker.0", messages.WorkerReady(0, 1, self.config.block_size), self.now)

    def add(self, request_id, ids, incarnation=0, priority=0, client=0):
        self.prompts[request_id] = ids
        self.tell(
            messages.AddRequest(
                request_id=request_id,
                incarnation=incarnation,
                prompt_token_ids=codec.pack(ids),
                params=NOTHING,
                output=messages.OutputSpec(client, "pooled"),
                arrival=self.now,
                priority=priority,
            )
        )

    def tell(self, message, source="tokenizer.0"):
        self.now += 1.0
        self.core.handle(source, message, self.now)

    def flush(self):
        for to, message in self.core.flush(self.now):
            if to == "workers":
                self.waiting.append(
                    codec.Decoder(messages.SchedulerToWorker)(codec.encode(message))
                )
            else:
                self.hear(message)

    def hear(self, message):
        match message:
            case messages.OpenStream():
                self.opened[message.stream] = message
            case messages.StreamStep():
                for stream, vector in message.pooled:
                    assert stream not in self.vectors
                    self.vectors[stream] = codec.floats(vector).tolist()
                for end in message.ends:
                    assert end.stream not in self.ends
                    self.ends[end.stream] = end.reason
            case messages.Ping():
                self.pings.append(message)
            case messages.ResetPrefixCache():
                self.resets.append(message)

    def execute(self):
        """The worker's next step."""
        plan = self.waiting.pop(0)
        for row in codec.ints(plan.removed).tolist():
            del self.rows[row]
        names = []
        for new in plan.new:
            assert new.row not in self.rows
            assert not new.block_ids
            self.rows[new.row] = codec.ints(new.token_ids).tolist()
            names.append(new.request_id)
        rows, counts = codec.ints(plan.rows).tolist(), codec.ints(plan.num_tokens).tolist()
        assert [len(self.rows[row]) for row in rows] == counts, "whole prompts only"
        assert sum(counts) <= self.config.max_num_batched_tokens
        self.steps.append(names)
        floats = [x for row in rows for x in vector_of(self.rows[row])]
        pooled = np.array(floats, dtype=np.float32).tobytes()
        self.tell(messages.StepOutput(plan.step, plan.rows, b"", pooled=pooled), "worker.0")

    def run(self):
        self.flush()
        while self.waiting:
            self.core.check()
            self.execute()
            self.flush()
        self.core.check()
        assert not self.core.num_unfinished
        assert self.ends.keys() == self.opened.keys()

    def by_request(self):
        """The vector of each request's last incarnation."""
        return {self.opened[stream].request_id: v for stream, v in self.vectors.items()}


@pytest.mark.parametrize("depth", [1, 2])
def test_every_prompt_has_its_vector(depth):
    e = Engine(max_steps_in_flight=depth)
    prompts = {f"r{n}": [n + 1] * (1 + n * 5 % LONGEST) for n in range(20)}
    for name, ids in prompts.items():
        e.add(name, ids)
    e.run()
    assert e.by_request() == {name: vector_of(ids) for name, ids in prompts.items()}
    assert set(e.ends.values()) == {"stop"}
    assert [name for step in e.steps for name in step] == list(prompts)
    statistics = e.core.statistics()
    assert statistics["prompt_tokens"] == sum(map(len, prompts.values()))
    assert statistics["first_tokens"] == 20
    assert statistics["generation_tokens"] == statistics["prefix_cache_queries"] == 0


def test_steps_are_full_and_whole():
    e = Engine(max_steps_in_flight=1)
    for name, length in (("a", 6), ("b", 10), ("c", 16), ("d", 1), ("e", 2), ("f", 3), ("g", 4)):
        e.add(name, [1] * length)
    e.add("h", [1])
    e.run()
    # The budget is 16 tokens, and there are 4 rows.
    assert [step for step in e.steps if step] == [["a", "b"], ["c"], ["d", "e", "f", "g"], ["h"]]


def test_priority_goes_first():
    e = Engine(scheduling_policy="priority", max_num_seqs=1)
    for name, priority in (("a", 2), ("b", 0), ("c", 1), ("d", 0)):
        e.add(name, [1], priority=priority)
    e.run()
    assert [step for step in e.steps if step] == [["b"], ["d"], ["c"], ["a"]]


def test_requests_wait_for_the_worker():
    e = Engine(ready=False)
    e.add("a", [3])
    e.flush()
    assert not e.waiting
    e.get_ready()
    e.run()
    assert e.by_request() == {"a": vector_of([3])}


def test_aborts_while_waiting_and_in_a_step():
    e = Engine(max_num_seqs=2, max_steps_in_flight=1)
    for name in "abcd":
        e.add(name, [ord(name) - 96])
    e.flush()  # a and b are in a step
    for name in "bd":
        e.tell(messages.AbortRequest(name, 0))
    e.run()
    assert e.by_request() == {"a": vector_of([1]), "c": vector_of([3])}
    assert list(e.ends.values()).count("abort") == 2


def test_a_newer_incarnation_takes_the_place_of_an_older():
    e = Engine(max_steps_in_flight=1)
    e.add("a", [1])
    e.flush()
    e.add("a", [1], incarnation=1)
    e.add("a", [1], incarnation=0)  # a straggler
    e.run()
    assert [o.incarnation for o in e.opened.values()] == [0, 1]
    assert list(e.ends.values()) == ["abort", "stop"]
    assert list(e.vectors) == [1]


@pytest.mark.parametrize("peer", ["client.0", "detokenizer.0"])
def test_the_loss_of_others_ends_what_was_theirs(peer):
    e = Engine(max_num_seqs=1)
    e.add("a", [1])
    e.add("b", [2])
    e.add("c", [3], client=1)
    e.flush()
    e.tell(PeerLost(), peer)
    e.run()
    assert list(e.by_request()) == (["c"] if peer == "client.0" else [])


def test_a_ping_goes_through_a_step():
    e = Engine()
    e.tell(messages.Ping(0, 7))
    e.flush()
    assert not e.pings
    e.execute()
    e.flush()
    assert e.pings == [messages.Ping(0, 7)]
    e.tell(messages.ResetPrefixCache(0, "x"))
    e.flush()
    assert e.resets


@pytest.mark.parametrize("seed", range(30))
def test_random_traffic(seed):
    chance = random.Random(seed)
    e = Engine(max_steps_in_flight=chance.randint(1, 3), max_num_seqs=chance.randint(1, 6))
    aborted = set()
    for n in range(60):
        e.add(f"r{n}", [chance.randrange(100) for _ in range(chance.randint(1, LONGEST))])
        if chance.random() < 0.2:
            name = f"r{chance.randint(0, n)}"
            e.tell(messages.AbortRequest(name, 0))
            aborted.add(name)
        if chance.random() < 0.5:
            e.flush()
        while e.waiting and chance.random() < 0.5:
            e.execute()
            e.core.check()
    e.run()
    vectors = e.by_request()
    assert e.prompts.keys() - aborted <= vectors.keys()
    assert vectors == {name: vector_of(e.prompts[name]) for name in vectors}
