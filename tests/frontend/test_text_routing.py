"""A client of several tokenizers and detokenizers: who goes by which, and what a death costs."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from ringcast.frontend.client import EngineClient
from ringcast.frontend.handle import RequestHandle
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
    Ping,
    ResetPrefixCache,
    Resume,
    TextPrompt,
    Tokenize,
    Tokenized,
)
from ringcast.mq.sampling_params import SamplingParams

IDS = codec.pack([7, 8, 9])


class Engine:
    """A client of two of each kind, and the other end of it in the test's hand."""

    def __init__(self, spec: ModelSpec, **options: Any) -> None:
        self.sent: list[Any] = []
        numbers = {"num_tokenizers": 2, "num_detokenizers": 2, **options}
        self.client = EngineClient(spec, self.send, **numbers)

    def send(self, to: str, message: Any) -> None:
        assert to == f"tokenizer.{message.tokenizer}"
        self.sent.append(message)

    def submit(self, n: int = 1) -> RequestHandle:
        return self.client.submit(TextPrompt("hi"), SamplingParams(n=n))

    def accept(self, *handles: RequestHandle) -> None:
        for handle in handles:
            accepted = Accepted(handle.request_id, handle.request.incarnation, IDS)
            self.client.deliver(f"tokenizer.{handle.request.tokenizer}", accepted)

    def say(
        self, handle: RequestHandle, ids: list[int], finish: Any = None, choice: int = 0
    ) -> None:
        first = len(handle.emitted[choice]) // 4
        end = None if finish is None else Finish(finish, 3, first + len(ids))
        incarnation = handle.request.incarnation
        chunk = Chunk(handle.request_id, incarnation, choice, first, codec.pack(ids), finish=end)
        self.client.deliver(f"detokenizer.{handle.request.detokenizer}", Chunks([chunk]))

    def lose(self, name: str, from_outside: bool = True) -> list[Any]:
        """What was sent on it."""
        before = len(self.sent)
        self.client.lost([name], "it died", from_outside)
        return self.sent[before:]

    def regain(self, name: str) -> list[Any]:
        before = len(self.sent)
        self.client.regained([name])
        return self.sent[before:]


@pytest.fixture
def engine(spec: ModelSpec) -> Engine:
    return Engine(spec)


def ways(sent: list[Any]) -> list[tuple[int, int]]:
    return [(m.tokenizer, m.detokenizer) for m in sent if isinstance(m, Generate)]


def test_requests_take_turns(engine: Engine) -> None:
    for _ in range(4):
        engine.submit()
    assert ways(engine.sent) == [(0, 0), (1, 1), (0, 0), (1, 1)]


def test_clients_begin_at_different_ones(spec: ModelSpec) -> None:
    engines = [Engine(spec, index=i) for i in range(3)]
    for engine in engines:
        engine.submit()
    assert [ways(engine.sent) for engine in engines] == [[(0, 0)], [(1, 1)], [(0, 0)]]


def test_the_one_with_less_to_do_gets_the_next(engine: Engine) -> None:
    handles = [engine.submit(n=3), engine.submit(), engine.submit()]
    assert ways(engine.sent) == [(0, 0), (1, 1), (0, 1)]
    engine.accept(handles[0], handles[2])
    assert ways([engine.submit().request]) == [(0, 1)]  # tokenizer.1 has not answered yet
    engine.accept(handles[1])
    for choice in range(3):
        engine.say(handles[0], [5], "stop", choice)
    assert ways([engine.submit().request]) == [(1, 0)]


def test_an_abort_goes_where_its_request_went(engine: Engine) -> None:
    handles = [engine.submit() for _ in range(2)]
    for handle in reversed(handles):
        handle.abort()
    assert engine.sent[2:] == [
        Abort(handles[1].request_id, 0, tokenizer=1),
        Abort(handles[0].request_id, 0, tokenizer=0),
    ]


def test_a_detokenizers_death_hands_its_own_over_at_once(engine: Engine) -> None:
    handles = [engine.submit() for _ in range(4)]
    engine.accept(*handles)
    engine.say(handles[1], [5, 6])
    sent = engine.lose("detokenizer.1")
    assert [(m.request_id, m.incarnation, m.tokenizer, m.detokenizer) for m in sent] == [
        (handles[1].request_id, 1, 1, 0),
        (handles[3].request_id, 1, 1, 0),
    ]
    assert sent[0].resume == [Resume(0, codec.pack([5, 6]))]
    assert [handle.request.incarnation for handle in handles] == [0, 1, 0, 1]
    assert engine.submit().request.detokenizer == 0
    assert engine.regain("detokenizer.1") == []
    assert engine.submit().request.detokenizer == 1


def test_a_tokenizers_death_hands_over_what_it_may_have_had(engine: Engine) -> None:
    handles = [engine.submit() for _ in range(4)]
    engine.accept(*handles[:2])
    engine.say(handles[0], [5])  # it runs, and needs its tokenizer no more
    (sent,) = engine.lose("tokenizer.0")
    assert (sent.request_id, sent.tokenizer, sent.detokenizer) == (handles[2].request_id, 1, 0)
    assert [handle.request.incarnation for handle in handles] == [0, 0, 1, 0]
    # Its straggler may be in a scheduler's channel until all have heard of the death.
    assert engine.regain("tokenizer.0") == [Abort(handles[2].request_id, 0, tokenizer=0)]


def test_who_runs_is_aborted_by_another_tokenizer(engine: Engine) -> None:
    running, fresh = engine.submit(), engine.submit()
    engine.accept(running)
    engine.say(running, [5])
    assert engine.lose("tokenizer.0") == []
    running.abort()
    assert engine.sent[-1] == Abort(running.request_id, 0, tokenizer=1)
    engine.say(running, [], "abort")
    assert not running.open
    assert fresh.request.incarnation == 0


def test_an_abort_that_died_with_its_tokenizer_goes_again_by_another(engine: Engine) -> None:
    running = engine.submit()
    engine.accept(running)
    engine.say(running, [5])
    running.abort()
    assert engine.lose("tokenizer.0") == [Abort(running.request_id, 0, tokenizer=1)]


def test_what_a_dead_tokenizer_may_have_had_is_aborted_when_it_is_back(engine: Engine) -> None:
    """Not before: the abort might overtake it."""
    handle = engine.submit()
    handle.abort()
    assert engine.lose("tokenizer.0") == []
    assert not handle.open
    assert engine.regain("tokenizer.0") == [Abort(handle.request_id, 0, tokenizer=0)]


@pytest.mark.parametrize("kind", ["tokenizer", "detokenizer"])
def test_everything_waits_while_all_of_a_kind_are_down(engine: Engine, kind: str) -> None:
    before = engine.submit()
    engine.lose(f"{kind}.0")
    engine.lose(f"{kind}.1")
    assert before.parked
    handle = engine.submit()
    assert handle.parked
    sent = [m for m in engine.regain(f"{kind}.1") if isinstance(m, Generate)]
    assert {m.request_id for m in sent} == {before.request_id, handle.request_id}
    assert {getattr(m, kind) for m in sent} == {1}


def test_two_deaths_are_all_that_a_request_can_cause(engine: Engine) -> None:
    poison, innocent = engine.submit(), engine.submit()
    (sent,) = engine.lose("tokenizer.0", from_outside=False)
    assert (sent.request_id, sent.tokenizer) == (poison.request_id, 1)
    engine.accept(innocent)
    engine.say(innocent, [5])
    assert engine.lose("tokenizer.1", from_outside=False) == []
    with pytest.raises(PoisonousRequestError, match="2 deaths of the tokenizer"):
        asyncio.run(anext(poison))  # type: ignore[arg-type]
    assert innocent.open


async def test_one_of_each_is_enough_to_be_ready(engine: Engine) -> None:
    answer = asyncio.create_task(engine.client.trouble(5))
    await asyncio.sleep(0)
    assert engine.sent == [Ping(0, 1, tokenizer=0, detokenizer=0)]
    assert engine.lose("detokenizer.0") == [Ping(0, 1, tokenizer=1, detokenizer=1)]
    engine.client.deliver("detokenizer.1", engine.sent[-1])
    assert await answer is None
    engine.lose("tokenizer.1")
    assert await engine.client.trouble(5) is None
    engine.lose("tokenizer.0")
    words = "detokenizer.0, tokenizer.0, tokenizer.1 will be started again"
    assert words in str(await engine.client.trouble(5))


async def test_a_reset_goes_by_every_tokenizer(engine: Engine) -> None:
    """So that no request that comes after it overtakes it."""
    task = asyncio.create_task(engine.client.reset_prefix_cache())
    await asyncio.sleep(0)
    assert [m.tokenizer for m in engine.sent] == [0, 1]
    engine.client.deliver("detokenizer.0", engine.sent[1])
    sent = engine.lose("tokenizer.0")  # the answer of its own may have been under way
    assert [(type(m), m.tokenizer) for m in sent] == [(ResetPrefixCache, 1)]
    await asyncio.sleep(0)
    assert not task.done()
    engine.client.deliver("detokenizer.0", sent[0])
    assert await task is True


async def test_a_question_is_asked_of_another_one(engine: Engine) -> None:
    first, second = (asyncio.create_task(engine.client.tokenize(TextPrompt(text))) for text in "ab")
    await asyncio.sleep(0)
    assert [(type(m), m.tokenizer) for m in engine.sent] == [(Tokenize, 0), (Tokenize, 1)]
    (again,) = engine.lose("tokenizer.0")
    assert (again.prompt, again.tokenizer) == (TextPrompt("a"), 1)
    for message in (engine.sent[1], again):
        engine.client.deliver("tokenizer.1", Tokenized(message.request_id, IDS))
    assert [answer.token_ids for answer in await asyncio.gather(first, second)] == [IDS, IDS]


async def test_a_question_is_blamed_for_its_own_tokenizers_deaths_alone(engine: Engine) -> None:
    asking = asyncio.create_task(engine.client.tokenize(TextPrompt("a")))
    await asyncio.sleep(0)
    engine.lose("tokenizer.1")
    engine.regain("tokenizer.1")
    (again,) = engine.lose("tokenizer.0")
    engine.regain("tokenizer.0")
    assert again.tokenizer == 1
    engine.lose("tokenizer.1")
    with pytest.raises(PoisonousRequestError, match="twice in a row"):
        await asking
