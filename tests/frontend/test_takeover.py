"""Deaths behind the ledger: who is handed over again, from where, and who not any more."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from ringcast.frontend.client import EngineClient
from ringcast.frontend.handle import RequestHandle
from ringcast.frontend.mailbox import Mailbox
from ringcast.mq import codec
from ringcast.mq.config import ModelSpec
from ringcast.mq.errors import EngineDeadError, InvalidRequestError, PoisonousRequestError
from ringcast.mq.messages import (
    Abort,
    Accepted,
    Chunk,
    Chunks,
    ErrorInfo,
    Finish,
    Generate,
    OutputSpec,
    Ping,
    Rejected,
    Resume,
    TextPrompt,
    TokensPrompt,
)
from ringcast.mq.sampling_params import SamplingParams

PROMPT = TextPrompt("hi")
IDS = codec.pack([7, 8, 9])
ENGINE = ["worker.0", "scheduler.0"]
TOKENIZER = ["tokenizer.0"]
DETOKENIZER = ["detokenizer.0"]
CHAT = OutputSpec(client=0, form="chat", delta=True)


class Engine:
    """A client, and the other end of it in the test's hand."""

    def __init__(self, spec: ModelSpec, **options: Any) -> None:
        self.sent: list[Any] = []
        self.client = EngineClient(spec, lambda to, message: self.sent.append(message), **options)

    def submit(self, output: OutputSpec | None = None, n: int = 1) -> RequestHandle:
        return self.client.submit(PROMPT, SamplingParams(n=n), output)

    def accept(self, *handles: RequestHandle) -> None:
        for handle in handles:
            accepted = Accepted(handle.request_id, handle.request.incarnation, IDS)
            self.client.deliver("tokenizer.0", accepted)

    def say(
        self,
        handle: RequestHandle,
        first: int,
        ids: list[int],
        finish: str | None = None,
        *,
        choice: int = 0,
        data: bytes = b"",
        incarnation: int | None = None,
    ) -> None:
        if incarnation is None:
            incarnation = handle.request.incarnation
        end = None if finish is None else Finish(finish, 3, first + len(ids))  # type: ignore[arg-type]
        chunk = Chunk(
            handle.request_id, incarnation, choice, first, codec.pack(ids), data=data, finish=end
        )
        self.client.deliver("detokenizer.0", Chunks([chunk]))

    def lose(self, names: list[str], error: str = "it died", from_outside: bool = False) -> None:
        self.client.lost(names, error, from_outside)

    def regain(self, names: list[str]) -> list[Any]:
        """What was sent on it."""
        before = len(self.sent)
        self.client.regained(names)
        return self.sent[before:]

    def crash(self, names: list[str], from_outside: bool = False) -> list[Any]:
        self.lose(names, from_outside=from_outside)
        return self.regain(names)

    def ids(self, sent: list[Any]) -> list[str]:
        return [message.request_id for message in sent if isinstance(message, Generate)]


@pytest.fixture
def engine(spec: ModelSpec) -> Engine:
    return Engine(spec)


def emitted(handle: RequestHandle) -> list[list[int]]:
    return [codec.ints(bytes(ids)).tolist() for ids in handle.emitted]


@pytest.mark.parametrize("names", [ENGINE, DETOKENIZER])
async def test_a_request_goes_on_where_it_was(engine: Engine, names: list[str]) -> None:
    handle = engine.submit()
    engine.accept(handle)
    engine.say(handle, 0, [5, 6])
    first = handle.request
    (again,) = engine.crash(names)
    assert again == handle.request
    assert (again.request_id, again.incarnation) == (first.request_id, 1)
    assert (again.params, again.output, again.arrival) == (
        first.params,
        first.output,
        first.arrival,
    )
    assert again.prompt == TokensPrompt(IDS)
    assert again.resume == [Resume(0, codec.pack([5, 6]))]
    engine.say(handle, 2, [9], incarnation=0)  # late words of the older one
    engine.say(handle, 2, [7], "stop")
    assert emitted(handle) == [[5, 6, 7]]
    assert [c.first_index async for c in handle] == [0, 2]
    assert engine.client.statistics() == {
        "open": 0,
        "requests": 1,
        "dropped": 1,
        "takeovers": 1,
        "parked": 0,
        "poisoned": 0,
    }


async def test_what_has_not_been_accepted_goes_again_as_it_was(engine: Engine) -> None:
    handle = engine.submit()
    (again,) = engine.crash(ENGINE)
    assert (again.incarnation, again.prompt, again.resume) == (1, PROMPT, [])
    engine.client.deliver("tokenizer.0", Accepted(handle.request_id, 0, IDS))
    assert not handle.accepted
    engine.accept(handle)
    assert handle.prompt_token_ids == IDS


async def test_a_rendered_stream_is_resumed_after_what_was_shown(engine: Engine) -> None:
    handle = engine.submit(CHAT)
    engine.accept(handle)
    engine.say(handle, 0, [5, 6], data=b"A")
    engine.say(handle, 2, [7])
    (again,) = engine.crash(ENGINE)
    assert again.resume == [Resume(0, codec.pack([5, 6]))]
    assert emitted(handle) == [[5, 6]]
    engine.say(handle, 2, [7])
    engine.say(handle, 3, [8], "length", data=b"B")
    assert b"".join([c.data async for c in handle]) == b"AB"
    assert emitted(handle) == [[5, 6, 7, 8]]


async def test_choices_that_have_ended_are_not_resumed(engine: Engine) -> None:
    handle = engine.submit(n=4)
    engine.accept(handle)
    engine.say(handle, 0, [5], choice=1)
    engine.say(handle, 0, [6], "stop", choice=2)
    (again,) = engine.crash(ENGINE)
    resumed = {0: [], 1: [5], 3: []}
    assert again.resume == [Resume(choice, codec.pack(ids)) for choice, ids in resumed.items()]
    for choice, ids in resumed.items():
        engine.say(handle, len(ids), [9], "stop", choice=choice)
    assert emitted(handle) == [[9], [5, 9], [6], [9]]
    assert engine.client.num_open == 0


async def test_a_choice_that_has_ended_is_something_to_resume_from(engine: Engine) -> None:
    handle = engine.submit(n=2)
    engine.accept(handle)
    engine.say(handle, 0, [], "length", choice=0)
    (again,) = engine.crash(ENGINE)
    assert again.resume == [Resume(1, b"")]


async def test_while_anything_is_down_nothing_is_sent(engine: Engine) -> None:
    old = engine.submit()
    engine.accept(old)
    engine.say(old, 0, [5])
    sent = len(engine.sent)
    engine.lose(ENGINE)
    engine.lose(TOKENIZER)
    new = engine.submit()
    ended = engine.submit()
    ended.abort()
    assert [c.finish and c.finish.reason async for c in ended] == ["abort"]
    assert engine.regain(ENGINE) == []
    assert engine.client.statistics()["parked"] == 2
    assert len(engine.sent) == sent
    again = engine.regain(TOKENIZER)
    # What was never sent goes first.
    assert engine.ids(again) == [new.request_id, old.request_id]
    assert [message.incarnation for message in again] == [0, 1]
    assert engine.regain(["client.1"]) == []


async def test_parked_requests_count_against_the_limit(spec: ModelSpec) -> None:
    engine = Engine(spec, max_num_queued_reqs=1)
    engine.lose(DETOKENIZER)
    engine.submit()
    assert engine.client.room == 0


async def test_the_death_of_a_client_is_none_of_ours(engine: Engine) -> None:
    engine.submit()
    engine.lose(["client.1"])
    engine.submit()
    assert len(engine.sent) == 2
    assert engine.client.statistics()["parked"] == 0


async def test_who_is_exposed_to_the_tokenizer(engine: Engine) -> None:
    unknown, accepted, speaking = engine.submit(), engine.submit(), engine.submit()
    engine.accept(accepted, speaking)
    engine.say(speaking, 0, [5])
    engine.lose(TOKENIZER)
    engine.say(speaking, 1, [6])
    engine.say(accepted, 0, [5], incarnation=0)  # the scheduler has it all the same
    assert emitted(speaking) == [[5, 6]]
    assert [handle.strikes for handle in (unknown, accepted, speaking)] == [1, 0, 0]
    again = engine.regain(TOKENIZER)
    assert engine.ids(again) == [accepted.request_id, unknown.request_id]
    assert speaking.request.incarnation == 0
    assert emitted(accepted) == [[]]


async def test_strikers_go_one_at_a_time_in_the_ledgers_order(engine: Engine) -> None:
    a, b, c = (engine.submit() for _ in range(3))
    engine.accept(a, b, c)
    for handle in (b, a, c):
        engine.say(handle, 0, [5])
    assert engine.ids(engine.crash(ENGINE)) == [a.request_id]
    new = engine.submit()
    assert engine.sent[-1] == new.request
    engine.accept(a)
    assert engine.sent[-1] == new.request
    engine.say(a, 1, [6] * 7)
    assert engine.sent[-1] == new.request
    engine.say(a, 8, [6])
    assert engine.sent[-1] == b.request
    engine.say(a, 9, [7])
    assert engine.sent[-1] == b.request
    engine.client.deliver("tokenizer.0", Rejected(b.request_id, 1, ErrorInfo("no", param="prompt")))
    assert engine.sent[-1] == c.request
    with pytest.raises(InvalidRequestError):
        async for _ in b:
            pass


async def test_a_rendered_striker_must_show_something(engine: Engine) -> None:
    a, b = engine.submit(CHAT), engine.submit(CHAT)
    engine.crash(ENGINE)
    engine.say(a, 0, [5] * 9)
    assert engine.sent[-1] == a.request
    engine.say(a, 9, [6], data=b"A")
    assert engine.sent[-1] == b.request


async def test_one_that_kills_twice_is_poisonous_and_the_others_are_not(engine: Engine) -> None:
    a, killer, b = (engine.submit() for _ in range(3))
    engine.accept(a, killer, b)
    engine.lose(ENGINE, "worker.0 died of signal 11")
    engine.regain(ENGINE)
    engine.say(a, 0, [5] * 8)
    assert engine.sent[-1] == killer.request
    engine.lose(ENGINE, "worker.0 died of signal 6")
    with pytest.raises(PoisonousRequestError) as caught:
        await anext(killer)
    assert killer.request_id in str(caught.value)
    assert "deaths of the engine in a row, and nothing came of it between" in str(caught.value)
    assert "worker.0 died of signal 6" in str(caught.value)
    assert caught.value.status == 500
    again = engine.regain(ENGINE)
    # A straggler may still be under way to the engine.
    assert again[0] == Abort(killer.request_id, 1)
    assert engine.ids(again) == [a.request_id]
    engine.say(a, 8, [6], "stop")
    assert engine.sent[-1] == b.request
    engine.say(b, 0, [6], "stop")
    assert engine.client.num_open == 0
    assert engine.client.statistics()["poisoned"] == 1


async def test_output_between_two_deaths_takes_a_strike_back(engine: Engine) -> None:
    handle = engine.submit()
    for place in range(5):
        engine.crash(ENGINE)
        assert handle.strikes == 1
        engine.say(handle, 8 * place, [place] * 8)
    engine.crash(ENGINE)
    assert engine.client.num_open == 1
    engine.lose(["scheduler.0", "worker.0"])
    assert engine.client.num_open == 0


async def test_what_the_tokenizer_s_death_parked_may_still_kill(engine: Engine) -> None:
    killer = engine.submit()
    engine.accept(killer)
    engine.lose(TOKENIZER)
    assert (killer.parked, killer.strikes) == (True, 0)
    engine.lose(ENGINE)  # by what the scheduler had got before
    engine.lose(ENGINE)
    assert (killer.parked, killer.strikes) == (True, 1)
    engine.regain(TOKENIZER)
    engine.regain(ENGINE)
    engine.lose(ENGINE)
    assert engine.client.statistics()["poisoned"] == 1


async def test_who_kills_from_outside_is_hardly_a_request(engine: Engine) -> None:
    a, b = engine.submit(), engine.submit()
    engine.accept(a, b)
    assert engine.ids(engine.crash(ENGINE, from_outside=True)) == [a.request_id, b.request_id]
    assert engine.ids(engine.crash(ENGINE, from_outside=True)) == [a.request_id]
    assert engine.ids(engine.crash(ENGINE, from_outside=True)) == [a.request_id]
    assert (a.blows, b.blows) == (3, 2)
    engine.crash(ENGINE, from_outside=True)
    assert engine.sent[-1] == b.request
    assert engine.client.statistics()["poisoned"] == 1
    engine.crash(ENGINE)  # two blows and a strike
    assert engine.client.statistics()["poisoned"] == 2


async def test_deaths_of_different_actors_don_t_make_a_killer(engine: Engine) -> None:
    handle = engine.submit()
    engine.accept(handle)
    for names in (ENGINE, DETOKENIZER, ENGINE, DETOKENIZER, TOKENIZER):
        engine.crash(names)
        assert handle.strikes == 1
    engine.lose(TOKENIZER)
    assert engine.client.statistics()["poisoned"] == 1


async def test_a_death_while_all_is_parked_changes_nothing(engine: Engine) -> None:
    handle = engine.submit()
    engine.accept(handle)
    engine.lose(ENGINE)
    parked = handle.request
    engine.lose(TOKENIZER)
    engine.lose(DETOKENIZER)
    engine.lose(ENGINE)
    assert (handle.request, handle.strikes) == (parked, 1)
    engine.regain(DETOKENIZER)
    engine.regain(TOKENIZER)
    assert engine.regain(ENGINE) == [parked]


async def test_two_deaths_in_a_row_of_different_actors(engine: Engine) -> None:
    handle = engine.submit()
    engine.accept(handle)
    engine.say(handle, 0, [5])
    engine.lose(TOKENIZER)
    assert not handle.parked
    engine.lose(ENGINE)
    assert handle.parked
    engine.regain(TOKENIZER)
    (again,) = engine.regain(ENGINE)
    assert (again.incarnation, again.resume) == (1, [Resume(0, codec.pack([5]))])


async def test_a_death_of_the_tokenizer_during_a_trial(engine: Engine) -> None:
    a, b = engine.submit(), engine.submit()
    engine.accept(a, b)
    engine.crash(ENGINE)
    engine.accept(a)
    assert engine.ids(engine.crash(TOKENIZER)) == [a.request_id]
    assert (a.strikes, a.request.incarnation, b.request.incarnation) == (1, 2, 1)
    engine.say(a, 0, [5], incarnation=1)
    assert engine.sent[-1] == a.request
    engine.say(a, 0, [5], "stop")
    assert engine.sent[-1] == b.request


async def test_aborting_what_waits_for_its_trial(engine: Engine) -> None:
    a, b, c = (engine.submit() for _ in range(3))
    engine.crash(ENGINE)
    b.abort()
    # It was sent before its strike, and that may still be under way.
    assert engine.sent[-1] == Abort(b.request_id, 1)
    assert [chunk.finish and chunk.finish.reason async for chunk in b] == ["abort"]
    a.abort()
    assert engine.sent[-1] == Abort(a.request_id, 1)
    engine.say(a, 0, [], "abort")
    assert engine.sent[-1] == c.request


@pytest.mark.parametrize("names", [ENGINE, DETOKENIZER, TOKENIZER])
async def test_aborting_and_then_a_death(engine: Engine, names: list[str]) -> None:
    handle = engine.submit(n=2)
    engine.say(handle, 0, [5], "stop", choice=1)
    if names != TOKENIZER:
        engine.accept(handle)
    handle.abort()
    engine.lose(names)
    ends = [(c.choice, c.finish) async for c in handle]
    assert [(choice, end.reason) for choice, end in ends if end] == [(1, "stop"), (0, "abort")]
    assert engine.client.num_open == 0
    assert engine.regain(names) == [Abort(handle.request_id, 0)]
    engine.say(handle, 0, [], "abort")
    assert engine.client.statistics()["dropped"] == 1


async def test_an_abort_that_the_tokenizer_may_have_lost_goes_again(engine: Engine) -> None:
    handle = engine.submit()
    engine.accept(handle)
    engine.say(handle, 0, [5])
    handle.abort()
    engine.lose(TOKENIZER)
    assert engine.client.num_open == 1
    assert engine.regain(TOKENIZER) == [Abort(handle.request_id, 0)]
    engine.say(handle, 1, [], "abort")
    assert engine.client.num_open == 0


async def test_an_abort_while_only_the_tokenizer_is_down(engine: Engine) -> None:
    handle = engine.submit()
    engine.accept(handle)
    engine.say(handle, 0, [5])
    engine.lose(TOKENIZER)
    sent = len(engine.sent)
    handle.abort()
    assert len(engine.sent) == sent
    assert engine.client.num_open == 1
    assert engine.regain(TOKENIZER) == [Abort(handle.request_id, 0)]


async def test_an_aborted_parked_request_has_its_tokens_counted(engine: Engine) -> None:
    handle = engine.submit()
    engine.accept(handle)
    engine.say(handle, 0, [5, 6])
    engine.lose(ENGINE)
    handle.abort()
    *_, last = [c async for c in handle]
    assert last.finish == Finish("abort", 3, 2)
    assert (last.first_index, last.token_ids) == (2, b"")
    assert engine.regain(ENGINE) == [Abort(handle.request_id, 1)]


async def test_discarding_a_parked_request_ends_its_mailbox(engine: Engine) -> None:
    mailbox = Mailbox()
    engine.lose(ENGINE)
    with engine.client.submit(PROMPT, SamplingParams(), mailbox=mailbox):
        pass
    assert await mailbox.take() == []
    assert engine.regain(ENGINE) == []


async def test_a_failed_choice_and_then_a_death(engine: Engine) -> None:
    handle = engine.submit(n=2)
    engine.accept(handle)
    engine.say(handle, 0, [], "error")
    engine.lose(ENGINE)
    assert engine.client.num_open == 0
    with pytest.raises(Exception, match="failed inside the engine"):
        await anext(handle)


async def test_a_drain_ends_though_the_engine_died(engine: Engine) -> None:
    kept, aborted = engine.submit(), engine.submit()
    engine.accept(kept, aborted)
    engine.client.draining = True
    idle = asyncio.create_task(engine.client.wait_idle())
    aborted.abort()
    engine.crash(ENGINE)
    await asyncio.sleep(0)
    assert not idle.done()
    engine.say(kept, 0, [5], "stop")
    await idle


async def test_nothing_comes_back(engine: Engine) -> None:
    open_, parked = engine.submit(), engine.submit()
    engine.accept(open_, parked)
    engine.say(open_, 0, [5])
    engine.lose(TOKENIZER)
    engine.client.fail_all(EngineDeadError("worker.0 died too often"))
    assert engine.client.num_open == 0
    engine.lose(ENGINE)
    assert engine.regain([*TOKENIZER, *ENGINE]) == []
    with pytest.raises(EngineDeadError, match="too often"):
        await anext(parked)


@pytest.fixture
def asked(engine: Engine) -> Callable[[], list[int]]:
    return lambda: [message.number for message in engine.sent if isinstance(message, Ping)]


async def test_a_silent_engine_is_asked(engine: Engine, asked: Callable[[], list[int]]) -> None:
    answers = [asyncio.create_task(engine.client.trouble(5)) for _ in range(3)]
    await asyncio.sleep(0)
    assert asked() == [1]
    engine.client.deliver("detokenizer.0", Ping(0, 1))
    assert await asyncio.gather(*answers) == [None, None, None]
    assert await engine.client.trouble(5) is None
    assert asked() == [1]


async def test_a_speaking_engine_is_not_asked(
    engine: Engine, asked: Callable[[], list[int]]
) -> None:
    engine.say(engine.submit(), 0, [5])
    assert await engine.client.trouble(5) is None
    assert asked() == []


async def test_no_answer_is_trouble(engine: Engine, asked: Callable[[], list[int]]) -> None:
    assert "not answered for 0.01 s" in str(await engine.client.trouble(0.01))
    assert "not answered" in str(await engine.client.trouble(0.001))
    assert asked() == [1, 2]


async def test_a_death_answers_who_asked(engine: Engine, asked: Callable[[], list[int]]) -> None:
    answer = asyncio.create_task(engine.client.trouble(60))
    await asyncio.sleep(0)
    engine.lose(ENGINE, "worker.0 was killed")
    words = "scheduler.0, worker.0 will be started again: worker.0 was killed"
    assert words in str(await answer)
    assert words in str(await engine.client.trouble(60))
    engine.regain(ENGINE)
    assert asked() == [1]
    answer = asyncio.create_task(engine.client.trouble(60))
    await asyncio.sleep(0)
    assert asked() == [1, 2]
    engine.client.draining = True
    engine.client.deliver("detokenizer.0", Ping(0, 2))
    assert "shutting down" in str(await answer)
