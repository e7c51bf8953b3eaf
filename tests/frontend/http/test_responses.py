"""/v1/responses: with the openai client, and event by event against the client's own types."""

from __future__ import annotations

import json
from typing import Any

import openai
import pydantic
import pytest
from openai.types.responses import Response, ResponseStreamEvent

from ringcast.mq.config import ModelSpec
from ringcast.mq.errors import EngineDeadError
from ringcast.mq.messages import ErrorInfo, ParserSpec

PATH = "/v1/responses"
TEXT = "Hello, wörld 🌍!"
USAGE = {
    "input_tokens": 7,
    "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
    "output_tokens": 5,
    "output_tokens_details": {"reasoning_tokens": 0},
    "total_tokens": 12,
}
THINKING = ["<think>", "Hm", "m.</thi", "nk>", "Yes", "."]


def connect(server: Any) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)


async def post(server: Any, body: Any) -> tuple[int, Any]:
    async with server.http.post(PATH, json=body) as answer:
        return answer.status, await answer.json()


async def events(server: Any, body: Any) -> list[Any]:
    """The events of a stream, each as the client's types have it."""
    adapter: pydantic.TypeAdapter[Any] = pydantic.TypeAdapter(ResponseStreamEvent)
    async with server.http.post(PATH, json={**body, "stream": True}) as answer:
        assert answer.status == 200, await answer.text()
        assert answer.headers["Content-Type"] == "text/event-stream; charset=utf-8"
        *blocks, end = (await answer.text()).split("\n\n")
    assert end == ""
    got = []
    for number, block in enumerate(blocks):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        assert event["sequence_number"] == number
        adapter.validate_python(event)
        got.append(event)
    return got


async def test_with_the_openai_client(serve: Any, engine: Any) -> None:
    engine.num_cached_tokens = 4
    async with serve() as server, connect(server) as api:
        answer = await api.responses.create(
            model="fake-model",
            instructions="Be brief.",
            input="hi",
            max_output_tokens=9,
            temperature=0.5,
            top_p=0.9,
            metadata={"a": "b"},
            store=True,
            user="me",
        )
    assert answer.output_text == TEXT
    assert (answer.status, answer.object, answer.error) == ("completed", "response", None)
    assert answer.id.startswith("resp_")
    assert answer.usage is not None
    assert answer.usage.input_tokens_details.cached_tokens == 4
    assert (answer.temperature, answer.top_p, answer.max_output_tokens) == (0.5, 0.9, 9)
    assert (answer.instructions, answer.metadata, answer.user) == ("Be brief.", {"a": "b"}, "me")
    (sent,) = engine.generated
    assert json.loads(sent.prompt.messages) == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "hi"},
    ]
    assert (sent.params.max_tokens, sent.params.temperature, sent.params.top_p) == (9, 0.5, 0.9)
    assert not sent.output.delta


async def test_the_object(serve: Any) -> None:
    async with serve() as server:
        status, answer = await post(server, {"input": "hi"})
    assert status == 200
    Response.model_validate(answer)
    (message,) = answer["output"]
    assert message.pop("id").startswith("msg_")
    assert message == {
        "type": "message",
        "role": "assistant",
        "status": "completed",
        "content": [{"type": "output_text", "text": TEXT, "annotations": [], "logprobs": []}],
    }
    assert answer["usage"] == USAGE
    assert answer["store"] is False
    assert answer["previous_response_id"] is None


def test_with_the_blocking_client(url: str) -> None:
    with openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0) as api:
        answer = api.responses.create(model="fake-model", input="hi")
        with api.responses.create(model="fake-model", input="hi", stream=True) as stream:
            pieces = [e.delta for e in stream if e.type == "response.output_text.delta"]
        with api.responses.stream(model="fake-model", input="hi") as helper:
            final = helper.get_final_response()
    assert answer.output_text == final.output_text == "".join(pieces) == TEXT


async def test_a_stream(serve: Any, engine: Any) -> None:
    async with serve() as server:
        got = await events(server, {"input": "hi", "stream_options": {}})
        _, whole = await post(server, {"input": "hi"})
    assert [event["type"].removeprefix("response.") for event in got] == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        *["output_text.delta"] * 5,
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    assert got[0]["response"]["status"] == got[1]["response"]["status"] == "in_progress"
    assert got[0]["response"]["output"] == []
    assert got[2]["item"]["status"] == "in_progress"
    assert "".join(event["delta"] for event in got[4:9]) == got[9]["text"] == TEXT
    assert got[10]["part"]["text"] == TEXT
    assert {event["item_id"] for event in got[3:11]} == {got[2]["item"]["id"]}
    last = got[-1]["response"]
    assert last["output"] == [got[11]["item"]]
    assert last["usage"] == USAGE
    ids = ("id", "created_at", "output")
    assert {k: v for k, v in last.items() if k not in ids} == {
        k: v for k, v in whole.items() if k not in ids
    }
    assert engine.generated[0].output.delta


async def test_an_output_cut_short(serve: Any) -> None:
    body = {"input": "hi", "max_output_tokens": 2}
    async with serve() as server:
        _, answer = await post(server, body)
        got = await events(server, body)
    for response in (answer, got[-1]["response"]):
        assert response["status"] == response["output"][0]["status"] == "incomplete"
        assert response["incomplete_details"] == {"reason": "max_output_tokens"}
        assert response["output"][0]["content"][0]["text"] == "Hello,"
    assert got[-1]["type"] == "response.incomplete"


async def test_an_output_without_text(serve: Any, engine: Any) -> None:
    engine.words = []
    async with serve() as server:
        _, answer = await post(server, {"input": "hi"})
        got = await events(server, {"input": "hi"})
    assert answer["output"][0]["content"][0]["text"] == ""
    assert got[-1]["response"]["output"][0]["status"] == "completed"
    assert [event["type"] for event in got].count("response.output_item.added") == 1


async def test_reasoning(serve: Any, engine: Any) -> None:
    engine.words = THINKING
    async with serve(reasoning_parser="qwen3") as server:
        _, answer = await post(server, {"input": "hi"})
        got = await events(server, {"input": "hi"})
        engine.words = THINKING[:2]
        _, unfinished = await post(server, {"input": "hi"})
    Response.model_validate(answer)
    thought, said = answer["output"]
    assert (thought["type"], thought["content"][0]["text"]) == ("reasoning", "Hmm.")
    assert (said["type"], said["content"][0]["text"]) == ("message", "Yes.")
    assert answer["usage"]["output_tokens_details"]["reasoning_tokens"] == 4
    assert got[-1]["response"]["output"][0]["content"] == thought["content"]
    assert got[-1]["response"]["usage"] == answer["usage"]
    kinds = [event["type"].removeprefix("response.") for event in got]
    assert kinds.index("reasoning_text.done") < kinds.index("output_text.delta")
    assert [event["output_index"] for event in got if event["type"].endswith("added")] == [
        0,
        0,
        1,
        1,
    ]
    assert [item["type"] for item in unfinished["output"]] == ["reasoning"]
    assert engine.generated[0].output.parsers == ParserSpec(reasoning="qwen3")


async def test_a_conversation_goes_on(serve: Any, engine: Any) -> None:
    engine.words = THINKING
    async with serve(reasoning_parser="qwen3") as server, connect(server) as api:
        first = await api.responses.create(model="fake-model", input="hi")
        said: list[Any] = [{"role": "user", "content": "hi"}]
        said += [item.model_dump() for item in first.output]
        said += [
            {
                "type": "message",
                "role": "user",
                "content": [
                    {"type": "input_text", "text": "a"},
                    {"type": "input_text", "text": "b"},
                ],
            },
            {"role": "developer", "content": "c"},
        ]
        await api.responses.create(model="fake-model", input=said)
    sent = json.loads(engine.generated[1].prompt.messages)
    assert [(message["role"], message["content"]) for message in sent] == [
        ("user", "hi"),
        ("assistant", "Yes."),
        ("user", "ab"),
        ("system", "c"),
    ]
    assert sent[1]["reasoning"] == sent[1]["reasoning_content"] == "Hmm."


def item(**fields: Any) -> dict[str, Any]:
    return {"input": [{"role": "user", "content": "hi", **fields}]}


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"input": None}, "input", "missing required"),
        ({"input": []}, "input", "empty list"),
        ({"input": 5}, "input", "expected `str | array`"),
        ({"input": ["hi"]}, "input[0]", "must be a message"),
        (item(role="tool"), "input[0].role", "user, assistant"),
        (item(type="function_call_output"), "input[0]", "'function_call_output'"),
        (item(no_such=1), "input[0].no_such", "unknown field"),
        (item(content=5), "input[0].content", "a string or a list"),
        (item(content=["hi"]), "input[0].content[0]", "must be an object"),
        (item(content=[{"type": "input_image"}]), "input[0].content[0]", "'input_image'"),
        (item(content=[{"type": "input_text"}]), "input[0].content[0].text", "a string"),
        (
            item(content=[{"type": "input_text", "text": "a", "x": 1}]),
            "input[0].content[0].x",
            "unknown field",
        ),
        (
            {"input": [{"type": "reasoning", "encrypted_content": "x"}]},
            "input[0].encrypted_content",
            "unknown field",
        ),
        (
            {"input": [{"type": "reasoning", "summary": [{"text": "x"}]}]},
            "input[0].summary",
            "read from content",
        ),
        ({"previous_response_id": "resp_1"}, "previous_response_id", "not stored here"),
        ({"conversation": "c"}, "conversation", "not stored here"),
        ({"tools": [{"type": "function"}]}, "tools", "/v1/chat/completions"),
        ({"tool_choice": "required"}, "tool_choice", "/v1/chat/completions"),
        ({"text": {"format": {"type": "json_object"}}}, "text", "guided decoding"),
        ({"reasoning": {"effort": "low"}}, "reasoning", "not set by the request"),
        ({"truncation": "auto"}, "truncation", "refused"),
        ({"background": True}, "background", "or false"),
        ({"include": ["x"]}, "include", "not supported"),
        ({"max_output_tokens": 0}, "max_output_tokens", "at least 1"),
        ({"temperature": -1}, "temperature", "at least 0"),
        ({"stream_options": {}}, "stream_options", "needs stream"),
        ({"messages": []}, "messages", "unknown field"),
        ({"metadata": {"a": 1}}, "metadata[...]", "expected `str`"),
        ({"priority": 1}, "priority", "--scheduling-policy"),
    ],
)
async def test_refusals(serve: Any, engine: Any, fields: Any, param: str, words: str) -> None:
    async with serve() as server:
        status, answer = await post(server, {"input": "hi", **fields})
    assert status == 400, answer
    assert answer["error"]["param"] == param, answer
    assert words in answer["error"]["message"]
    assert engine.sent == []


async def test_neutral_values_and_the_models_defaults(
    serve: Any, engine: Any, spec: ModelSpec
) -> None:
    spec.sampling_defaults.update(temperature=0.2, top_k=20)
    neutral = {
        "background": False,
        "include": [],
        "previous_response_id": None,
        "prompt_cache_key": "k",
        "reasoning": {"effort": None},
        "service_tier": "auto",
        "text": {"format": {"type": "text"}, "verbosity": None},
        "tool_choice": "auto",
        "tools": [],
        "top_logprobs": 0,
        "truncation": "disabled",
    }
    async with serve() as server:
        status, answer = await post(server, {"input": "hi", **neutral})
    assert status == 200, answer
    assert answer["temperature"] == 0.2
    assert (engine.generated[0].params.top_k, engine.generated[0].params.max_tokens) == (20, None)


@pytest.mark.parametrize("stream", [False, True])
async def test_errors_before_the_first_event(serve: Any, engine: Any, stream: bool) -> None:
    engine.reject = ErrorInfo("too long", 400, param="messages", code="context_length_exceeded")
    async with serve() as server:
        status, answer = await post(server, {"input": "hi", "stream": stream})
        assert (status, answer["error"]["param"]) == (400, "input")
        assert answer["error"]["code"] == "context_length_exceeded"
        status, answer = await post(server, {"input": "hi", "model": "other"})
        assert (status, answer["error"]["param"]) == (404, "model")


async def test_a_failure_after_the_first_event(serve: Any, engine: Any, client: Any) -> None:
    engine.fail = ErrorInfo("the worker stumbled", 500, "internal_server_error")
    async with serve() as server:
        got = await events(server, {"input": "hi"})
        assert got[-1]["type"] == "response.failed"
        assert got[-1]["response"]["status"] == "failed"
        assert got[-1]["response"]["error"]["message"] == "the worker stumbled"
        status, answer = await post(server, {"input": "hi"})
        assert (status, answer["error"]["message"]) == (500, "the worker stumbled")
        client.fail_all(EngineDeadError("worker.0 died"))
        assert (await post(server, {"input": "hi"}))[0] == 500


async def test_a_client_that_hangs_up(serve: Any, engine: Any, until: Any) -> None:
    engine.hold = 1
    async with serve() as server:
        async with server.http.post(PATH, json={"input": "hi", "stream": True}) as answer:
            assert await answer.content.readuntil(b"Hello")
        await until(lambda: len(engine.aborted) == 1)


async def test_the_request_id_names_the_response(serve: Any) -> None:
    async with serve() as server:
        headers = {"X-Request-Id": "trace-17"}
        async with server.http.post(PATH, json={"input": "hi"}, headers=headers) as answer:
            assert answer.headers["X-Request-Id"] == "trace-17"
            assert (await answer.json())["id"] == "resp_trace-17"
