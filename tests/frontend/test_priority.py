"""A request's priority, from every door to what is sent to the engine."""

from __future__ import annotations

from typing import Any

import pytest

from ringcast.frontend.async_llm import AsyncLLM
from ringcast.frontend.client import EngineClient
from ringcast.frontend.llm import LLM
from ringcast.mq.config import ModelSpec
from ringcast.mq.errors import InvalidRequestError
from ringcast.mq.messages import TextPrompt
from ringcast.mq.sampling_params import SamplingParams

MESSAGES = [{"role": "user", "content": "hi"}]
POLICY = {"scheduling_policy": "priority"}


@pytest.fixture
def client(spec: ModelSpec, engine: Any) -> EngineClient:
    client = EngineClient(spec, engine.send, policy="priority")
    engine.deliver, engine.die = client.deliver, client.fail_all
    return client


@pytest.mark.parametrize(
    ("path", "body"),
    [("/v1/chat/completions", {"messages": MESSAGES}), ("/v1/completions", {"prompt": ["a", "b"]})],
)
async def test_over_http(serve: Any, engine: Any, path: str, body: Any) -> None:
    async with serve() as server:
        for priority in (-3, 2**40, None, 0):
            async with server.http.post(path, json={**body, "priority": priority}) as answer:
                assert answer.status == 200, await answer.text()
    got = [request.priority for request in engine.generated]
    assert got[:: len(got) // 4] == [-3, 2**40, 0, 0]


async def test_of_an_async_llm(connection: Any, engine: Any) -> None:
    async with AsyncLLM(**POLICY) as llm:
        async for _ in llm.generate("a", priority=-2):
            pass
        async for _ in llm.chat(MESSAGES, priority=4):
            pass
    assert [request.priority for request in engine.generated] == [-2, 4]


def test_of_an_llm(connection: Any, engine: Any) -> None:
    """One for all or one for each; results come in the order of the prompts all the same."""
    with LLM(**POLICY) as llm:  # type: ignore[arg-type]
        llm.generate(["a", "b"], use_tqdm=False, priority=3)
        params = [SamplingParams(max_tokens=i + 1) for i in range(3)]
        results = llm.generate(["a", "b", "c"], params, use_tqdm=False, priority=[5, -1, 5])
        llm.chat(MESSAGES, use_tqdm=False, priority=[1])
        for _ in llm.stream("a", priority=6):
            pass
        for _ in llm.stream_chat(MESSAGES, priority=7):
            pass
    assert [len(result.outputs[0].token_ids) for result in results] == [1, 2, 3]
    sent = [(request.prompt, request.priority) for request in engine.generated]
    assert [priority for _, priority in sent] == [3, 3, -1, 5, 5, 1, 6, 7]
    assert [prompt for prompt, _ in sent[2:5]] == [TextPrompt(text) for text in "bac"]


@pytest.mark.parametrize(
    ("priority", "words"),
    [([1], "one for each of the 2 prompts, got 1"), ([1, "2"], "an integer")],
)
def test_of_an_llm_that_are_refused(connection: Any, priority: Any, words: str) -> None:
    with LLM(**POLICY) as llm, pytest.raises(InvalidRequestError, match=words) as caught:  # type: ignore[arg-type]
        llm.generate(["a", "b"], use_tqdm=False, priority=priority)
    assert caught.value.param == "priority"


async def test_without_the_policy_it_is_refused(connection: Any, engine: Any) -> None:
    async with AsyncLLM() as llm:
        with pytest.raises(InvalidRequestError, match="--scheduling-policy priority") as caught:
            async for _ in llm.generate("a", priority=1):
                pass
        async for _ in llm.generate("a", priority=0):
            pass
    assert caught.value.param == "priority"
    assert len(engine.generated) == 1


@pytest.mark.parametrize("priority", [True, 1.0, "1", None, 2**63, -(2**63) - 1])
async def test_what_is_no_priority(client: EngineClient, priority: Any) -> None:
    with pytest.raises(InvalidRequestError, match="64 bits"):
        client.submit(TextPrompt("a"), SamplingParams(), priority=priority)
    assert client.num_open == 0


async def test_a_takeover_keeps_it(spec: ModelSpec) -> None:
    sent: list[Any] = []
    client = EngineClient(spec, lambda to, message: sent.append(message), policy="priority")
    client.submit(TextPrompt("a"), SamplingParams(), priority=-7)
    client.lost(["scheduler.0"], "it died")
    client.regained(["scheduler.0"])
    assert [(request.incarnation, request.priority) for request in sent] == [(0, -7), (1, -7)]
