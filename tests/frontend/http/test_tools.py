"""Tool calls and reasoning over HTTP: what is asked of the engine, what clients get of it."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from ringcast.mq.messages import ErrorInfo, ParserSpec

HERMES: dict[str, Any] = {"enable_auto_tool_choice": True, "tool_call_parser": "hermes"}
PATH = "/v1/chat/completions"
ASK = [{"role": "user", "content": "What's the weather in Paris?"}]
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather of a place",
            "parameters": {
                "type": "object",
                "properties": {"place": {"type": "string"}},
                "required": ["place"],
            },
        },
    },
    {"type": "function", "function": {"name": "get_time"}},
]
ARGUMENTS = '{"place": "Par\\u0069s, \\"FR\\" {"}'
WORDS = [
    "Let me ",
    "see.<tool",
    '_call>\n{"name": "get_',
    f'weather", "arguments": {ARGUMENTS[:9]}',
    f"{ARGUMENTS[9:]}}}\n</tool_",
    'call>\n<tool_call>{"name": "get_time", "arguments": {}}',
    "</tool_call>\n",
]
THINKING = ["<thi", "nk>Hm, ", "9.11?</th", "ink>\n\n", *WORDS]


def connect(server: Any) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)


def put_together(chunks: list[Any], choice: int = 0) -> dict[str, Any]:
    """A choice's message from its stream, as clients do it."""
    message: dict[str, Any] = {"content": "", "reasoning": "", "calls": {}, "reasons": []}
    for chunk in chunks:
        for of_choice in chunk.choices:
            if of_choice.index != choice:
                continue
            delta = of_choice.delta
            message["content"] += delta.content or ""
            reasoning = getattr(delta, "reasoning_content", None) or ""
            assert reasoning == (getattr(delta, "reasoning", None) or "")
            message["reasoning"] += reasoning
            for part in delta.tool_calls or []:
                if part.id is not None:
                    assert part.type == "function"
                    assert part.index == len(message["calls"])
                    message["calls"][part.index] = [part.id, part.function.name, ""]
                message["calls"][part.index][2] += part.function.arguments
            message["reasons"] += [of_choice.finish_reason] if of_choice.finish_reason else []
    return message


@pytest.mark.parametrize("stream", [False, True])
async def test_calls_with_the_openai_client(serve: Any, engine: Any, stream: bool) -> None:
    engine.words = THINKING
    asked: dict[str, Any] = {"model": "fake-model", "messages": ASK, "tools": TOOLS, "n": 2}
    async with serve(**HERMES, reasoning_parser="qwen3") as server, connect(server) as api:
        if stream:
            events = await api.chat.completions.create(**asked, stream=True)
            chunks = [chunk async for chunk in events]
            assert [c.choices[0].delta.role for c in chunks].count("assistant") == 2
            said = [put_together(chunks, choice) for choice in (0, 1)]
        else:
            answer = await api.chat.completions.create(**asked)
            said = []
            for choice in answer.choices:
                message: Any = choice.message
                assert message.reasoning == message.reasoning_content
                calls = {
                    i: [call.id, call.function.name, call.function.arguments]
                    for i, call in enumerate(message.tool_calls)
                }
                said.append(
                    {
                        "content": message.content,
                        "reasoning": message.reasoning,
                        "calls": calls,
                        "reasons": [choice.finish_reason],
                    }
                )
    ids = [call.pop(0) for one in said for call in one["calls"].values()]
    assert len(set(ids)) == 4
    assert all(name.startswith("chatcmpl-tool-") for name in ids)
    assert said == 2 * [
        {
            "content": "\n\nLet me see.",
            "reasoning": "Hm, 9.11?",
            "calls": {0: ["get_weather", ARGUMENTS], 1: ["get_time", "{}"]},
            "reasons": ["tool_calls"],
        }
    ]
    sent = engine.generated[0]
    assert sent.output.parsers == ParserSpec("hermes", "qwen3")
    assert json.loads(sent.prompt.tools) == TOOLS
    assert sent.params.skip_special_tokens


async def test_a_call_and_its_answer_go_back(serve: Any, engine: Any) -> None:
    engine.words = ["<tool", *WORDS[2:5], "call>"]
    async with serve(**HERMES) as server, connect(server) as api:
        first: Any = await api.chat.completions.create(
            model="fake-model", messages=ASK, tools=TOOLS, parallel_tool_calls=True
        )
        message = first.choices[0].message
        assert message.content is None
        (call,) = message.tool_calls
        engine.words = ["It is ", "sunny."]
        history = [
            *ASK,
            message.model_dump(),
            {"role": "tool", "tool_call_id": call.id, "content": "sunny"},
        ]
        second = await api.chat.completions.create(
            model="fake-model", messages=history, tools=TOOLS
        )
    assert second.choices[0].message.content == "It is sunny."
    assert second.choices[0].message.tool_calls is None
    assert second.choices[0].finish_reason == "stop"
    sent = json.loads(engine.generated[1].prompt.messages)
    assert sent[1]["tool_calls"][0]["function"]["arguments"] == ARGUMENTS
    assert sent[2]["role"] == "tool"


async def test_events(serve: Any, engine: Any) -> None:
    """One change to a call in an event, the role in the first, the finish in the last."""
    engine.words = ['<tool_call>{"name": "f", "arguments": {}}</tool_call> \n']
    async with serve(**HERMES) as server:
        body = {"messages": ASK, "tools": TOOLS, "stream": True, "logprobs": True}
        async with server.http.post(PATH, json=body) as answer:
            *lines, _, _ = (await answer.text()).split("\n\n")
    events = [json.loads(line.removeprefix("data: "))["choices"][0] for line in lines]
    name = events[0]["delta"]["tool_calls"][0].pop("id")
    function = {"name": "f", "arguments": ""}
    start = {"index": 0, "type": "function", "function": function}
    assert [event["delta"] for event in events] == [
        {"role": "assistant", "content": None, "tool_calls": [start]},
        {"tool_calls": [{"index": 0, "function": {"arguments": "{}"}}]},
        {},
    ]
    assert name.startswith("chatcmpl-tool-")
    assert [event["finish_reason"] for event in events] == [None, None, "tool_calls"]
    assert [event["logprobs"] is not None for event in events] == [True, False, False]


async def test_only_the_first_call(serve: Any, engine: Any) -> None:
    engine.words = WORDS
    async with serve(**HERMES) as server, connect(server) as api:
        asked: dict[str, Any] = {"model": "fake-model", "messages": ASK, "tools": TOOLS}
        answer = await api.chat.completions.create(**asked, parallel_tool_calls=False)
        stream = await api.chat.completions.create(**asked, parallel_tool_calls=False, stream=True)
        chunks = [chunk async for chunk in stream]
    (call,) = answer.choices[0].message.tool_calls or []
    assert list(put_together(chunks)["calls"]) == [0]
    assert call.id.startswith("chatcmpl-tool-")


async def test_reasoning_without_tools(serve: Any, engine: Any) -> None:
    engine.words = ["Hm.", "</think>", "Yes"]
    async with serve(reasoning_parser="deepseek_r1") as server, connect(server) as api:
        asked: dict[str, Any] = {"model": "fake-model", "messages": ASK}
        answer: Any = await api.chat.completions.create(**asked)
        engine.words = ["Hm."]
        unfinished: Any = await api.chat.completions.create(**asked)
        engine.words = ["</think>Yes"]
        brief: Any = await api.chat.completions.create(**asked)
    messages = [each.choices[0].message for each in (answer, unfinished, brief)]
    said = [(message.reasoning_content, message.content) for message in messages]
    assert said == [("Hm.", "Yes"), ("Hm.", None), (None, "Yes")]
    assert answer.choices[0].finish_reason == "stop"


async def test_reasoning_in_the_history_goes_by_every_name(serve: Any, engine: Any) -> None:
    said = {"role": "assistant", "content": "a"}
    async with serve() as server:
        for given in ({"reasoning": "r"}, {"reasoning_content": "r", "reasoning": None}, {}):
            async with server.http.post(PATH, json={"messages": [said | given]}) as answer:
                assert answer.status == 200
    sent = [json.loads(request.prompt.messages)[0] for request in engine.generated]
    assert [(m.get("reasoning"), m.get("reasoning_content")) for m in sent] == [
        ("r", "r"),
        ("r", "r"),
        (None, None),
    ]


@pytest.mark.parametrize(
    ("options", "fields", "parsers", "has_tools"),
    [
        (HERMES, {}, None, False),
        (HERMES, {"tools": TOOLS}, ParserSpec("hermes"), True),
        (HERMES, {"tools": TOOLS, "tool_choice": "auto"}, ParserSpec("hermes"), True),
        (HERMES, {"tools": TOOLS, "tool_choice": "none"}, None, True),
        (HERMES, {"tools": [], "tool_choice": "auto"}, None, False),
        (HERMES, {"tools": None, "tool_choice": None, "parallel_tool_calls": None}, None, False),
        ({}, {"tools": TOOLS, "tool_choice": "none"}, None, True),
        ({"reasoning_parser": "qwen3"}, {}, ParserSpec(reasoning="qwen3"), False),
    ],
)
async def test_what_is_asked_of_the_engine(
    serve: Any, engine: Any, options: Any, fields: Any, parsers: Any, has_tools: bool
) -> None:
    engine.words = ["<tool_call>"]
    async with (
        serve(**options) as server,
        server.http.post(PATH, json={"messages": ASK, **fields}) as answer,
    ):
        body = await answer.json()
    assert body["choices"][0]["finish_reason"] == "stop"
    assert "tool_calls" not in body["choices"][0]["message"]
    (sent,) = engine.generated
    assert sent.output.parsers == parsers
    assert bool(sent.prompt.tools) == has_tools


def function(**fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", **fields}}


NAMED = {"type": "function", "function": {"name": "get_time"}}


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"tools": "f"}, "tools", "expected `array"),
        ({"tools": ["f"]}, "tools[0]", "must be an object"),
        ({"tools": [{"type": "custom"}]}, "tools[0].type", "'custom'"),
        ({"tools": [function(), {"type": "function"}]}, "tools[1].function", "got None"),
        ({"tools": [function(name="")]}, "tools[0].function.name", "1 to 128 letters"),
        ({"tools": [function(name="a b")]}, "tools[0].function.name", "'a b'"),
        ({"tools": [function(name="x" * 129)]}, "tools[0].function.name", "1 to 128"),
        ({"tools": [function(description=1)]}, "tools[0].function.description", "a string"),
        ({"tools": [function(strict="yes")]}, "tools[0].function.strict", "true or false"),
        ({"tools": [function(parameters=[])]}, "tools[0].function.parameters", "JSON schema"),
        (
            {"tools": [function(parameters={"type": "string"})]},
            "tools[0].function.parameters.type",
            "'string'",
        ),
        (
            {"tools": [function(parameters={"properties": []})]},
            "tools[0].function.parameters.properties",
            "an object",
        ),
        (
            {"tools": [function(parameters={"properties": {"a": "string"}})]},
            "tools[0].function.parameters.properties.a",
            "a JSON schema",
        ),
        (
            {"tools": [function(parameters={"required": "a"})]},
            "tools[0].function.parameters.required",
            "a list of names",
        ),
        ({"tools": TOOLS, "tool_choice": "some"}, "tool_choice", "must be"),
        ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice", "must be"),
        ({"tools": TOOLS, "tool_choice": 5}, "tool_choice", "expected `str | object"),
        ({"tools": TOOLS, "tool_choice": "required"}, "tool_choice", "guided decoding"),
        ({"tools": TOOLS, "tool_choice": NAMED}, "tool_choice", "guided decoding"),
        ({"tools": TOOLS[:1], "tool_choice": NAMED}, "tool_choice", "not in tools"),
        ({"tool_choice": NAMED}, "tool_choice", "not in tools"),
        ({"tools": TOOLS, "parallel_tool_calls": 1}, "parallel_tool_calls", "expected `bool"),
        ({"response_format": {"type": "json_object"}}, "response_format", "guided decoding"),
        ({"guided_json": {}}, "guided_json", "guided decoding"),
    ],
)
async def test_refusals(serve: Any, engine: Any, fields: Any, param: str, words: str) -> None:
    async with (
        serve(**HERMES) as server,
        server.http.post(PATH, json={"messages": ASK, **fields}) as answer,
    ):
        assert answer.status == 400
        error = (await answer.json())["error"]
    assert error["param"] == param, error
    assert words in error["message"]
    assert engine.sent == []


@pytest.mark.parametrize("options", [{}, {"tool_call_parser": "hermes"}])
async def test_auto_needs_its_options(serve: Any, engine: Any, options: Any) -> None:
    async with serve(**options) as server, connect(server) as api:
        with pytest.raises(openai.BadRequestError, match="--enable-auto-tool-choice") as caught:
            await api.chat.completions.create(model="fake-model", messages=ASK, tools=TOOLS)  # type: ignore[arg-type]
    assert caught.value.param == "tool_choice"
    assert '"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser' in str(
        caught.value
    )
    assert engine.sent == []


@pytest.mark.parametrize("stream", [False, True])
async def test_values_get_the_types_of_the_schema(serve: Any, engine: Any, stream: bool) -> None:
    parameters = {
        "properties": {
            "city": {"type": "string"},
            "days": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
            "units": {"$ref": "#/$defs/units"},
        },
        "$defs": {"units": {"type": "array", "items": {"enum": ["C", "F"]}}},
    }
    engine.words = [
        "Let me see.\n\n<tool_",
        "call>\n<function=f>\n<parameter=city>\n12",
        "\n</parameter>\n<parameter=days>\n3\n</param",
        'eter>\n<parameter=units>\n["C"]\n</parameter>\n</function>\n</tool_call>',
    ]
    options = {"enable_auto_tool_choice": True, "tool_call_parser": "qwen3_coder"}
    asked: Any = {
        "model": "fake-model",
        "messages": ASK,
        "tools": [function(parameters=parameters)],
    }
    async with serve(**options) as server, connect(server) as api:
        if stream:
            events = await api.chat.completions.create(**asked, stream=True)
            said = put_together([chunk async for chunk in events])
            content, [(_, name, arguments)] = said["content"], said["calls"].values()
        else:
            answer = await api.chat.completions.create(**asked)
            message = answer.choices[0].message
            (call,) = message.tool_calls or []
            content, name, arguments = message.content, call.function.name, call.function.arguments
    assert (content, name) == ("Let me see.\n\n", "f")
    assert json.loads(arguments) == {"city": "12", "days": 3, "units": ["C"]}
    (sent,) = engine.generated
    assert sent.output.parsers == ParserSpec(
        "qwen3_coder", types={"f": {"days": ["integer", "null"], "units": ["array"]}}
    )


async def test_a_failure_is_no_call(serve: Any, engine: Any) -> None:
    engine.words = WORDS
    engine.fail = ErrorInfo("the worker stumbled", 500, "internal_server_error")
    async with (
        serve(**HERMES) as server,
        server.http.post(PATH, json={"messages": ASK, "tools": TOOLS}) as answer,
    ):
        assert answer.status == 500
