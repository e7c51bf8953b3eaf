"""reset_prefix_cache at the client: asked once, asked again after a death, and told of the end."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from ringcast.frontend.async_llm import AsyncLLM
from ringcast.frontend.client import EngineClient
from ringcast.frontend.llm import LLM
from ringcast.mq.config import ModelSpec
from ringcast.mq.errors import EngineDeadError
from ringcast.mq.messages import ResetPrefixCache

ENGINE = ["worker.0", "scheduler.0"]


class Recorder:
    """A client and what it sent."""

    def __init__(self, spec: ModelSpec) -> None:
        self.sent: list[Any] = []
        self.client = EngineClient(spec, lambda to, message: self.sent.append(message), 4)

    async def ask(self) -> asyncio.Task[bool]:
        task = asyncio.create_task(self.client.reset_prefix_cache())
        await asyncio.sleep(0)
        return task


@pytest.fixture
def recorder(spec: ModelSpec) -> Recorder:
    return Recorder(spec)


async def test_each_is_answered_by_its_own_answer(recorder: Recorder) -> None:
    first, second = await recorder.ask(), await recorder.ask()
    assert [type(message) for message in recorder.sent] == [ResetPrefixCache] * 2
    assert [message.client for message in recorder.sent] == [4, 4]
    recorder.client.deliver("detokenizer.0", recorder.sent[1])
    assert await second is True
    assert not first.done()
    recorder.client.deliver("detokenizer.0", recorder.sent[0])
    assert await first is True


async def test_an_older_client_s_answer_is_not_its_own(spec: ModelSpec) -> None:
    old, new = Recorder(spec), Recorder(spec)
    cut, task = await old.ask(), await new.ask()
    new.client.deliver("detokenizer.0", old.sent[0])
    assert new.client.statistics()["dropped"] == 1
    assert not task.done()
    new.client.deliver("detokenizer.0", new.sent[0])
    assert await task
    cut.cancel()


@pytest.mark.parametrize("names", [ENGINE, ["tokenizer.0"], ["detokenizer.0"]])
async def test_what_may_have_died_on_its_way_is_sent_again(
    recorder: Recorder, names: list[str]
) -> None:
    before = await recorder.ask()
    recorder.client.lost(names, "it died")
    during = await recorder.ask()
    assert len(recorder.sent) == 1
    recorder.client.regained(names)
    first, *again = recorder.sent
    assert again[0] == first
    assert len(again) == 2
    recorder.client.regained(names)  # nothing was down any more
    assert len(recorder.sent) == 3
    for message in again:
        recorder.client.deliver("detokenizer.0", message)
    assert await asyncio.gather(before, during) == [True, True]
    recorder.client.deliver("detokenizer.0", first)
    assert recorder.client.statistics()["dropped"] == 1


async def test_one_that_was_cancelled_is_not_sent_again(recorder: Recorder) -> None:
    task = await recorder.ask()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    recorder.client.lost(ENGINE, "it died")
    recorder.client.regained(ENGINE)
    assert len(recorder.sent) == 1


async def test_a_dead_engine_can_not(recorder: Recorder) -> None:
    task = await recorder.ask()
    recorder.client.fail_all(EngineDeadError("worker.0 died too often"))
    with pytest.raises(EngineDeadError, match="too often"):
        await task
    with pytest.raises(EngineDeadError, match="too often"):
        await recorder.client.reset_prefix_cache()


async def test_async_llm(connection: Any, engine: Any) -> None:
    async with AsyncLLM("some-model") as llm:
        assert await llm.reset_prefix_cache() is True
    assert [type(message) for message in engine.sent] == [ResetPrefixCache]


def test_llm(connection: Any, engine: Any) -> None:
    with LLM("some-model") as llm:
        assert llm.reset_prefix_cache() is True
    with pytest.raises(EngineDeadError, match="shut down"):
        llm.reset_prefix_cache()


async def test_http(serve: Any, client: EngineClient, engine: Any) -> None:
    async with serve() as server:
        async with server.http.post("/reset_prefix_cache") as answer:
            assert (answer.status, await answer.text()) == (200, "")
        assert [type(message) for message in engine.sent] == [ResetPrefixCache]
        async with server.http.get("/reset_prefix_cache") as answer:
            assert answer.status == 405
        client.fail_all(EngineDeadError("worker.0 died too often"))
        async with server.http.post("/reset_prefix_cache") as answer:
            assert answer.status == 500
