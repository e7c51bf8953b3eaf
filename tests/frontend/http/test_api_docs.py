"""/openapi.json, /docs and /load; and that answers have the shapes that are told there."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import msgspec
import pytest

from ringcast import __version__
from ringcast.frontend.http import answers
from ringcast.frontend.http.api_docs import TYPES
from ringcast.frontend.http.response_object import Response

CHAT = {"messages": [{"role": "user", "content": "hi"}]}
TOOLS = [{"type": "function", "function": {"name": "f"}}]
USAGE_OPTIONS = {
    "stream": True,
    "stream_options": {"include_usage": True, "continuous_usage_stats": True},
}
CHAT_PATH, COMPLETION_PATH = "/v1/chat/completions", "/v1/completions"


async def openapi(server: Any) -> Any:
    async with server.http.get("/openapi.json") as answer:
        assert answer.content_type == "application/json"
        return await answer.json()


def references(value: Any) -> set[str]:
    if isinstance(value, dict):
        inner = set().union(*map(references, value.values()))
        return inner | ({value["$ref"]} if isinstance(value.get("$ref"), str) else set())
    return set().union(*map(references, value)) if isinstance(value, list) else set()


async def test_every_route_is_described(serve: Any) -> None:
    async with serve() as server:
        document = await openapi(server)
        assert document["openapi"].startswith("3.1.")
        assert document["info"] == {"title": "Ringcast", "version": __version__}
        paths = document["paths"]
        assert {"/health", "/v1/models/{model}", "/docs", "/ping", "/load"} <= set(paths)
        assert set(paths["/ping"]) == {"get", "post"}
        for path, methods in paths.items():
            async with server.http.patch(path.replace("{model}", "x")) as answer:
                assert answer.status == 405, path
            for method, operation in methods.items():
                assert operation["summary"], (method, path)
        for method, path in TYPES:
            assert method.lower() in paths[path]


async def test_schemas(serve: Any) -> None:
    async with serve() as server:
        document = await openapi(server)
    schemas = document["components"]["schemas"]
    names = {name.removeprefix("#/components/schemas/") for name in references(document)}
    assert names == set(schemas)
    chat = document["paths"][CHAT_PATH]["post"]
    body = chat["requestBody"]["content"]["application/json"]["schema"]
    assert body == {"$ref": "#/components/schemas/ChatRequest"}
    assert schemas["ChatRequest"]["required"] == ["messages"]
    assert not schemas["ChatRequest"]["additionalProperties"]
    assert set(chat["responses"]["200"]["content"]) == {"application/json", "text/event-stream"}
    for status in ("4XX", "5XX"):
        error = chat["responses"][status]["content"]["application/json"]["schema"]
        assert error == {"$ref": "#/components/schemas/ErrorResponse"}
    assert set(schemas["ErrorBody"]["properties"]) == {"message", "type", "param", "code"}
    (parameter,) = document["paths"]["/v1/models/{model}"]["get"]["parameters"]
    assert (parameter["name"], parameter["in"]) == ("model", "path")


async def test_a_body_may_have_what_the_server_lets_through(serve: Any) -> None:
    async with serve() as server:
        schemas = (await openapi(server))["components"]["schemas"]
    chat = schemas["ChatRequest"]["properties"]
    null = {"type": "null"}
    assert chat["stream"] == {"anyOf": [{"type": "boolean"}, null], "default": False}
    assert null not in chat["messages"].get("anyOf", [])
    assert chat["user"] == {"description": "Accepted, as clients send it; it changes nothing"}
    assert chat["response_format"] == {"enum": [{"type": "text"}, None]}
    assert chat["length_penalty"] == {"enum": [1, None]}
    assert schemas["CompletionRequest"]["properties"]["echo"]["anyOf"][0] == {"type": "boolean"}
    response = schemas["ResponseRequest"]["properties"]
    assert response["truncation"] == {"enum": ["disabled", None]}
    assert null in schemas["StreamOptions"]["properties"]["include_usage"]["anyOf"]
    assert "suffix" not in schemas["EmbeddingRequest"]["properties"]


async def test_events_are_described_as_they_come(serve: Any) -> None:
    async with serve() as server:
        paths = (await openapi(server))["paths"]

    def data(path: str) -> Any:
        content = paths[path]["post"]["responses"]["200"]["content"]
        return content["text/event-stream"]["schema"]["properties"]["data"]

    said, done = data(CHAT_PATH)["anyOf"]
    assert done == {"const": "[DONE]"}
    assert said["contentMediaType"] == "application/json"
    names = [ref["$ref"].rpartition("/")[2] for ref in said["contentSchema"]["anyOf"]]
    assert names == ["ChatCompletionChunk", "ErrorResponse"]
    assert data("/v1/responses")["contentSchema"]["$ref"].endswith("/ResponseEvent")


async def test_keys_are_described_where_there_are_any(serve: Any) -> None:
    async with serve() as server:
        document = await openapi(server)
        assert "securitySchemes" not in document["components"]
    async with serve(api_key=["k"]) as server:
        headers = {"Authorization": "Bearer k"}
        async with server.http.get("/openapi.json", headers=headers) as answer:
            document = await answer.json()
    (name,) = document["components"]["securitySchemes"]
    assert document["paths"][CHAT_PATH]["post"]["security"] == [{name: []}]
    assert "security" not in document["paths"]["/health"]["get"]


async def test_the_page_needs_nothing_from_elsewhere(serve: Any) -> None:
    async with serve() as server, server.http.get("/docs") as answer:
        assert (answer.status, answer.content_type) == (200, "text/html")
        assert "default-src 'none'" in answer.headers["Content-Security-Policy"]
        page = await answer.text()
    assert 'fetch("openapi.json")' in page
    assert not re.search(r"https?:|//[a-z]+\.|src=|@import", page)


async def test_load(serve: Any, engine: Any, until: Any) -> None:
    engine.hold = 0
    async with serve() as server:
        body = {"prompt": ["a", "b"]}
        running = asyncio.create_task(server.http.post(COMPLETION_PATH, json=body))
        await until(lambda: len(engine.generated) == 2)
        async with server.http.get("/load") as answer:
            assert await answer.json() == {"server_load": 2}
        engine.hold = None
        (await running).close()
        async with server.http.get("/load") as answer:
            assert await answer.json() == {"server_load": 0}


@pytest.mark.parametrize("path", ["/status", "/v1/models", "/v1/models/fake-model", "/version"])
async def test_what_is_got_has_the_shape(serve: Any, path: str) -> None:
    kind = TYPES["GET", path.replace("fake-model", "{model}")][1]
    async with serve() as server, server.http.get(path) as answer:
        assert answer.status == 200
        msgspec.convert(await answer.json(), kind)


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT_PATH, {}),
        (CHAT_PATH, {"logprobs": True, "top_logprobs": 2, "n": 2}),
        (CHAT_PATH, {"prompt_logprobs": 1, "return_token_ids": True}),
        (CHAT_PATH, {"tools": TOOLS}),
        (CHAT_PATH, {"tools": TOOLS, **USAGE_OPTIONS}),
        (CHAT_PATH, {"stream": True, "logprobs": True, "top_logprobs": 1}),
        (COMPLETION_PATH, {"logprobs": 2, "n": 2}),
        (COMPLETION_PATH, {"prompt_logprobs": 1, "return_token_ids": True}),
        (COMPLETION_PATH, {"echo": True, "logprobs": 1}),
        (COMPLETION_PATH, {"stream": True, "logprobs": 1}),
        (COMPLETION_PATH, {"echo": True, **USAGE_OPTIONS}),
        ("/v1/responses", {}),
    ],
)
@pytest.mark.usefixtures("tokenizer")
async def test_answers_have_the_shapes(serve: Any, engine: Any, path: str, fields: Any) -> None:
    begin = ["<think>Hm", "</think>Yes"]
    engine.words = [*begin, ' <tool_call>{"name": "f", "arguments": {}}</tool_call>']
    prompt = {CHAT_PATH: CHAT, COMPLETION_PATH: {"prompt": "hi"}, "/v1/responses": {"input": "a"}}
    options = {"enable_auto_tool_choice": True, "tool_call_parser": "hermes"}
    _, whole, event = TYPES["POST", path]
    body = {**prompt[path], **fields}
    async with (
        serve(**options, reasoning_parser="qwen3") as server,
        server.http.post(path, json=body) as answer,
    ):
        text = await answer.text()
        assert answer.status == 200, text
    if not body.get("stream"):
        msgspec.json.decode(text, type=whole)
        return
    *events, done, _ = text.split("\n\n")
    assert done == "data: [DONE]"
    for data in events:
        msgspec.json.decode(data.removeprefix("data: "), type=event)
    assert len(events) > 3


async def test_a_response_has_no_other_fields(serve: Any) -> None:
    async with serve() as server, server.http.post("/v1/responses", json={"input": "a"}) as answer:
        got = await answer.json()
    decoded = msgspec.convert(got, Response)
    assert json.loads(msgspec.json.encode(decoded)) == got


def test_a_wrong_shape_is_seen() -> None:
    card = {"id": "m", "object": "model", "created": 1, "owned_by": "me", "root": "m"}
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(card, answers.ModelCard)
    whole = {**card, "parent": None, "max_model_len": 1}
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({**whole, "more": 1}, answers.ModelCard)
