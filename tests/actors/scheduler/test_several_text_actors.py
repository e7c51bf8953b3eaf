"""A scheduler with two tokenizers and two detokenizers: what goes where, and what a death ends."""

from __future__ import annotations

import pytest

from ringcast.actors.core import PeerLost
from ringcast.actors.scheduler.core import SchedulerCore
from ringcast.executor.fake_runner import FakeModelRunner, expected_tokens
from ringcast.mq import codec, messages
from ringcast.mq.config import EngineConfig
from ringcast.mq.sampling_params import SamplingParams


class Two:
    """One core. told: what each detokenizer has heard."""

    def __init__(self, spec) -> None:
        config = EngineConfig(device="fake", block_size=4, max_num_seqs=8)
        self.spec = spec
        self.core = SchedulerCore(config, spec, num_tokenizers=2, num_detokenizers=2)
        self.runner = FakeModelRunner(config, spec)
        self.told: dict[str, list] = {"detokenizer.0": [], "detokenizer.1": []}
        self.outputs = [self.runner.load(lambda *_: None)]

    def add(self, name, *, by=0, to=0, client=0, n=1, incarnation=0, num_tokens=4):
        request = messages.AddRequest(
            request_id=name,
            incarnation=incarnation,
            prompt_token_ids=codec.pack([len(name), 5, 6]),
            params=SamplingParams(seed=0, max_tokens=num_tokens, n=n),
            output=messages.OutputSpec(client),
            arrival=0.0,
            detokenizer=to,
        )
        self.core.handle(f"tokenizer.{by}", request, 0.0)

    def rows(self):
        """The requests that run, in order."""
        return [sequence.request.request_id for sequence in self.core.planner.running]

    def step(self):
        for output in self.outputs:
            self.core.handle("worker.0", output, 0.0)
        self.outputs.clear()
        for to, message in self.core.flush(0.0):
            if to == "workers":
                self.outputs.append(self.runner.execute(message))
            else:
                self.told[to].append(message)
        self.core.check()

    def run(self):
        self.step()
        while self.core.num_unfinished or self.outputs:
            self.step()

    def opened(self, to):
        return [m for m in self.told[f"detokenizer.{to}"] if isinstance(m, messages.OpenStream)]

    def ends(self, to):
        steps = [m for m in self.told[f"detokenizer.{to}"] if isinstance(m, messages.StreamStep)]
        return {end.stream: end.reason for step in steps for end in step.ends}

    def tokens(self, to):
        found: dict[int, list[int]] = {}
        for step in self.told[f"detokenizer.{to}"]:
            if isinstance(step, messages.StreamStep):
                pairs = zip(codec.longs(step.streams), codec.ints(step.token_ids), strict=True)
                for stream, token in pairs:
                    found.setdefault(int(stream), []).append(int(token))
        return found


@pytest.fixture
def two(model_spec):
    return Two(model_spec(eos_token_ids=[]))


def test_a_stream_is_one_detokenizers_from_its_opening_to_its_end(two):
    two.add("a", to=0)
    two.add("bb", to=1, n=3)
    two.add("ccc", by=1, to=1)
    two.run()
    assert [(o.request_id, o.choice) for o in two.opened(0)] == [("a", 0)]
    assert [(o.request_id, o.choice) for o in two.opened(1)] == [
        *(("bb", choice) for choice in range(3)),
        ("ccc", 0),
    ]
    for to in (0, 1):
        streams = {o.stream: o for o in two.opened(to)}
        assert two.ends(to) == dict.fromkeys(streams, "length")
        assert two.tokens(to) == {
            stream: expected_tokens([len(o.request_id), 5, 6], o.choice, 4, two.spec)
            for stream, o in streams.items()
        }


def test_a_lost_detokenizer_ends_its_own_streams(two):
    two.add("a", to=0)
    two.add("bb", to=1, n=2)
    two.step()
    two.core.handle("detokenizer.1", PeerLost(), 0.0)
    two.run()
    assert set(two.ends(1).values()) == {"abort"}
    assert set(two.ends(0).values()) == {"length"}


def test_a_request_moves_to_another_detokenizer(two):
    two.add("a", to=1)
    two.step()
    two.add("a", by=1, to=0, incarnation=1)
    two.run()
    assert list(two.ends(1).values()) == ["abort"]
    assert list(two.ends(0).values()) == ["length"]


def test_pings_and_resets_come_back_by_the_detokenizer_that_they_name(two):
    two.core.handle("tokenizer.1", messages.Ping(0, 7, 0, 1, 1), 0.0)
    two.core.handle("tokenizer.0", messages.ResetPrefixCache(0, "r", 0, 0, 1), 0.0)
    two.step()
    two.step()
    assert two.told["detokenizer.0"] == []
    assert {type(m) for m in two.told["detokenizer.1"]} == {
        messages.Ping,
        messages.ResetPrefixCache,
    }


def test_a_tokenizers_word_of_a_dead_client_ends_what_came_by_it(two):
    """The client's next incarnation may have sent something by another already."""
    two.core.handle("client.3", PeerLost(), 0.0)
    two.add("late", by=1, client=3)
    two.add("new", by=0, to=1, client=3)
    two.core.handle("tokenizer.0", messages.Ping(3, 1, 0, 0, 1), 0.0)
    two.core.handle("tokenizer.1", messages.AbortClient(3), 0.0)
    two.run()
    assert list(two.ends(0).values()) == ["abort"]
    assert list(two.ends(1).values()) == ["length"]
    assert any(isinstance(m, messages.Ping) for m in two.told["detokenizer.1"])


def test_the_answer_to_a_gateway_is_the_last_on_every_way(two):
    for to in (0, 1):
        two.add("a" * (to + 1), to=to)
    two.step()
    two.core.handle("tokenizer.0", messages.PeersGone(9, ["client.0"]), 0.0)
    two.step()
    for to in (0, 1):
        assert list(two.ends(to).values()) == ["abort"]
        assert two.told[f"detokenizer.{to}"][-1] == messages.PeersGoneHeard(9)


def test_who_came_first_is_first_whichever_detokenizer_it_goes_by(two):
    """Also after one of them has had many more choices than the other."""
    two.add("many", to=0, n=6)
    two.run()
    for name, to in (("a", 0), ("bb", 1), ("ccc", 1), ("dddd", 0)):
        two.add(name, to=to)
    two.step()
    assert two.rows() == ["a", "bb", "ccc", "dddd"]


def test_there_are_more_streams_than_32_bits_can_count(two):
    two.core._last_stream = 2**31 - 2
    two.add("a", to=1, n=3)
    two.run()
    streams = [2**31 - 1, 2**31 + 1, 2**31 + 3]
    assert two.ends(1) == dict.fromkeys(streams, "length")
    assert sorted(two.tokens(1)) == streams
