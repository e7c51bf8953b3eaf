"""A client of several replicas: who gets a request, and what the death of one costs."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from ringcast.frontend.client import EngineClient
from ringcast.frontend.handle import PROOF_TOKENS, RequestHandle
from ringcast.mq import codec
from ringcast.mq.config import ModelSpec
from ringcast.mq.errors import PoisonousRequestError
from ringcast.mq.messages import (
    Abort,
    Accepted,
    Chunk,
    Chunks,
    Finish,
    Generate,
    Loads,
    Ping,
    ResetPrefixCache,
    Resume,
    TextPrompt,
)
from ringcast.mq.sampling_params import SamplingParams

IDS = codec.pack([7, 8, 9])
NUM_REPLICAS = 3


def replica(number: int) -> list[str]:
    return [f"worker.{number}", f"scheduler.{number}"]


class Engine:
    """A client of three replicas, and the other end of it in the test's hand."""

    def __init__(self, spec: ModelSpec, **options: Any) -> None:
        self.sent: list[Any] = []
        self.client = EngineClient(
            spec,
            lambda to, message: self.sent.append(message),
            num_engines=NUM_REPLICAS,
            **options,
        )

    def submit(self, n: int = 1, text: str = "hi") -> RequestHandle:
        handle = self.client.submit(TextPrompt(text), SamplingParams(n=n))
        accepted = Accepted(handle.request_id, handle.request.incarnation, IDS)
        self.client.deliver("tokenizer.0", accepted)
        return handle

    def say(
        self, handle: RequestHandle, ids: list[int], finish: str | None = None, choice: int = 0
    ) -> None:
        first = len(handle.emitted[choice]) // 4
        end = None if finish is None else Finish(finish, 3, first + len(ids))  # type: ignore[arg-type]
        incarnation = handle.request.incarnation
        chunk = Chunk(handle.request_id, incarnation, choice, first, codec.pack(ids), finish=end)
        self.client.deliver("detokenizer.0", Chunks([chunk]))

    def lose(self, *names: str, from_outside: bool = False) -> list[Any]:
        """What was sent on it."""
        before = len(self.sent)
        self.client.lost(names, "it died", from_outside)
        return self.sent[before:]

    def regain(self, *names: str) -> list[Any]:
        before = len(self.sent)
        self.client.regained(names)
        return self.sent[before:]


@pytest.fixture
def engine(spec: ModelSpec) -> Engine:
    return Engine(spec)


def publish(engine: Engine, waiting: list[int], running: list[int], ours: list[int]) -> None:
    counts = (codec.pack(values) for values in (waiting, running, ours))
    engine.client.deliver("coordinator.0", Loads(*counts, b""))


def test_requests_take_turns(engine: Engine) -> None:
    assert [engine.submit().engine for _ in range(6)] == [0, 1, 2, 0, 1, 2]
    assert [message.engine for message in engine.sent] == [0, 1, 2, 0, 1, 2]


def test_clients_begin_at_different_replicas(spec: ModelSpec) -> None:
    assert [Engine(spec, index=i).submit().engine for i in range(4)] == [0, 1, 2, 0]


def test_what_has_ended_makes_room(engine: Engine) -> None:
    handles = [engine.submit(n=2) for _ in range(3)]
    engine.say(handles[1], [5], "stop", choice=0)
    assert engine.submit().engine == 1
    engine.say(handles[2], [5], "stop", choice=0)
    engine.say(handles[2], [5], "stop", choice=1)
    assert engine.submit().engine == 2


def test_what_others_do_counts(engine: Engine) -> None:
    publish(engine, [0, 0, 1], [0, 3, 0], [0, 0, 0])
    assert [engine.submit().engine for _ in range(4)] == [0, 1, 2, 0]


def test_a_burst_spreads_though_nobody_publishes(engine: Engine) -> None:
    publish(engine, [0, 0, 0], [9, 9, 9], [0, 0, 0])
    engines = [engine.submit().engine for _ in range(30)]
    assert [engines.count(number) for number in range(3)] == [10, 10, 10]


def test_a_death_hands_over_to_the_others_at_once(engine: Engine) -> None:
    handles = [engine.submit() for _ in range(4)]
    engine.say(handles[0], [5, 6])
    sent = engine.lose(*replica(0), from_outside=True)
    assert [(m.request_id, m.engine, m.incarnation) for m in sent] == [
        (handles[0].request_id, 1, 1),
        (handles[3].request_id, 2, 1),
    ]
    assert sent[0].resume == [Resume(0, codec.pack([5, 6]))]
    assert [handle.request.incarnation for handle in handles] == [1, 0, 0, 1]
    assert engine.submit().engine in (1, 2)


def test_stragglers_are_ended_when_their_replica_is_back(engine: Engine) -> None:
    handle = engine.submit()
    engine.lose(*replica(0), from_outside=True)
    assert engine.regain(*replica(0)) == [Abort(handle.request_id, 0, engine=0)]
    assert [engine.submit().engine for _ in range(2)] == [2, 0]


def test_who_is_with_a_live_replica_stays_there(engine: Engine) -> None:
    """After the detokenizer's death: its prompt is cached there, and it supersedes itself."""
    handles = [engine.submit() for _ in range(3)]
    engine.say(handles[1], [5] * PROOF_TOKENS, "stop")
    assert engine.lose("detokenizer.0", from_outside=True) == []
    sent = engine.regain("detokenizer.0")
    assert [(m.request_id, m.engine) for m in sent] == [
        (handles[0].request_id, 0),
        (handles[2].request_id, 2),
    ]


def test_an_abort_goes_where_the_request_is(engine: Engine) -> None:
    handle = [engine.submit() for _ in range(2)][1]
    handle.abort()
    assert engine.sent[-1] == Abort(handle.request_id, 0, engine=1)


def test_requests_wait_while_all_are_down(engine: Engine) -> None:
    for number in range(3):
        engine.lose(*replica(number), from_outside=True)
    handle = engine.submit()
    assert handle.parked
    assert engine.regain(*replica(2)) == [handle.request]
    assert handle.engine == 2


def test_poison_takes_two_replicas_and_no_third(engine: Engine) -> None:
    poison, innocent = engine.submit(), None
    (again,) = engine.lose(*replica(0))
    assert (again.request_id, again.engine) == (poison.request_id, 1)
    innocent = engine.submit()
    assert innocent.engine == 2
    assert engine.lose(*replica(1)) == []
    with pytest.raises(PoisonousRequestError, match="2 deaths of the engine"):
        asyncio.run(anext(poison))  # type: ignore[arg-type]
    assert not innocent.request.incarnation


def test_suspects_go_one_at_a_time_whichever_replica(engine: Engine) -> None:
    suspects = [engine.submit() for _ in range(6)]
    (first,) = engine.lose(*replica(0))
    assert first.request_id == suspects[0].request_id
    assert engine.lose(*replica(2)) == []  # two more suspects
    before = len(engine.sent)
    for handle in (suspects[0], suspects[2]):
        engine.say(handle, [5] * PROOF_TOKENS)
    sent = [m for m in engine.sent[before:] if isinstance(m, Generate)]
    assert [m.request_id for m in sent] == [suspects[2].request_id, suspects[3].request_id]


async def test_one_live_replica_is_enough_to_be_ready(engine: Engine) -> None:
    engine.lose(*replica(0))
    answer = asyncio.create_task(engine.client.trouble(5))
    await asyncio.sleep(0)
    assert engine.sent == [Ping(0, 1, engine=1), Ping(0, 1, engine=2)]
    engine.client.deliver("detokenizer.0", Ping(0, 1, engine=2))
    assert await answer is None
    engine.lose(*replica(1))
    assert await engine.client.trouble(5) is None
    engine.lose(*replica(2))
    assert "scheduler.0, scheduler.1, scheduler.2" in str(await engine.client.trouble(5))


async def test_a_reset_is_done_when_every_live_replica_has_done_it(engine: Engine) -> None:
    engine.lose(*replica(1))
    task = asyncio.create_task(engine.client.reset_prefix_cache())
    await asyncio.sleep(0)
    assert [message.engine for message in engine.sent] == [0, 2]
    name = engine.sent[0].request_id
    engine.client.deliver("detokenizer.0", ResetPrefixCache(0, name, engine=2))
    await asyncio.sleep(0)
    assert not task.done()
    engine.lose(*replica(0))  # its cache has gone with it
    assert await task is True


def test_the_same_beginning_goes_to_the_same_replica(spec: ModelSpec) -> None:
    engine = Engine(spec, routing="prefix")
    long, other = "a" * 4096, "b" * 4096
    assert engine.submit(text=long + "x").engine == 0
    assert engine.submit(text=other).engine == 1
    assert engine.submit(text=long + "y").engine == 0
    engine.lose(*replica(0), from_outside=True)
    engine.regain(*replica(0))
    moved = {engine.submit(text=long + "z").engine for _ in range(2)}
    assert 0 in moved  # it has nothing to do, and nobody has the beginning any more than it


def test_load_outweighs_a_beginning(spec: ModelSpec) -> None:
    engine = Engine(spec, routing="prefix")
    engines = [engine.submit(text="a" * 4096).engine for _ in range(30)]
    assert engines[:2] == [0, 0]
    assert set(engines) == {0, 1, 2}


def leave(engine: Engine, *names: str) -> list[str]:
    """What the client says, now and later."""
    said: list[str] = []
    engine.client.leave(names, lambda: said.append("left"))
    return said


def remove(engine: Engine, *names: str) -> list[Any]:
    """What was sent on it."""
    before = len(engine.sent)
    engine.client.removed(names)
    return engine.sent[before:]


def test_a_replica_that_leaves_gets_nothing_new_and_ends_what_it_has(engine: Engine) -> None:
    handles = [engine.submit() for _ in range(3)]
    said = leave(engine, *replica(1), *replica(2))
    assert [engine.submit().engine for _ in range(4)] == [0, 0, 0, 0]
    engine.say(handles[1], [5], "stop")
    assert said == []
    engine.client.abort(handles[2])
    assert engine.sent[-1] == Abort(handles[2].request_id, 0, 2)
    engine.say(handles[2], [5], "abort")
    assert said == ["left"]
    assert remove(engine, *replica(1)) == remove(engine, *replica(2)) == []
    assert leave(engine, *replica(1)) == ["left"]


def test_what_is_left_goes_on_elsewhere_and_it_is_no_strike(engine: Engine) -> None:
    handles = [engine.submit() for _ in range(3)]
    engine.say(handles[2], [5, 6])
    for number in (2, 1):
        said = leave(engine, *replica(number))
        (sent,) = remove(engine, *replica(number))  # and no Abort to who is no more
        assert (sent.request_id, sent.engine) == (handles[number].request_id, 0)
        assert said == ["left"]
    assert handles[2].request.resume == [Resume(0, codec.pack([5, 6]))]
    assert [(handle.strikes, handle.blows) for handle in handles] == [(0, 0)] * 3
    engine.regain(*replica(1))
    assert engine.submit().engine == 1


def test_an_aborted_request_ends_with_its_replica(engine: Engine) -> None:
    handle = [engine.submit() for _ in range(2)][1]
    engine.client.abort(handle)
    assert remove(engine, *replica(1)) == []
    assert not handle.open
    finish = handle.finishes[0]
    assert finish is not None
    assert finish.reason == "abort"


def test_while_only_those_that_leave_live_everything_new_waits(engine: Engine) -> None:
    handles = [engine.submit() for _ in range(3)]
    leave(engine, *replica(1), *replica(2))
    assert engine.lose(*replica(0), from_outside=True) == []
    assert handles[0].parked
    assert engine.submit().parked
    engine.say(handles[1], [5], "stop")
    assert remove(engine, *replica(1)) == remove(engine, *replica(2)) == []
    assert handles[2].parked
    sent = engine.regain(*replica(0))
    assert sorted(message.engine for message in sent) == [0, 0, 0]
    assert not handles[2].parked
