"""The openai package, sync and async: every method that applies, and what it makes of errors."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import Any

import openai
from cases import EMBEDDING_MODEL, KEY, MODEL, case, refusal, run, url, wait_idle
from pydantic import BaseModel

QUESTION: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather in a city.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'


class City(BaseModel):
    name: str


def connect(server: str, **options: Any) -> openai.OpenAI:
    options = {"api_key": KEY, "max_retries": 0, "timeout": 60.0, **options}
    return openai.OpenAI(base_url=url(server), **options)


def connect_async(server: str, **options: Any) -> openai.AsyncOpenAI:
    options = {"api_key": KEY, "max_retries": 0, "timeout": 60.0, **options}
    return openai.AsyncOpenAI(base_url=url(server), **options)


def say(text: str) -> list[Any]:
    """Messages to which the echo server answers with the text."""
    return [{"role": "user", "content": f"Say [[{text}]]"}]


@case("models")
def models() -> None:
    with connect("real") as api:
        assert [model.id for model in api.models.list()] == [MODEL]
        assert api.models.retrieve(MODEL).object == "model"


@case("completions")
def completions() -> None:
    with connect("real") as api:
        answer = api.completions.create(
            model=MODEL, prompt="1, 2, 3, 4,", temperature=0, max_tokens=12, stop=["8"], logprobs=2
        )
        choice = answer.choices[0]
        assert choice.text.startswith(" 5, 6, 7") and "8" not in choice.text
        assert choice.finish_reason == "stop"
        assert choice.logprobs and len(choice.logprobs.token_logprobs or []) > 3
        ids = answer.usage and answer.usage.prompt_tokens
        assert ids and answer.usage and answer.usage.completion_tokens > 3
        many = api.completions.create(model=MODEL, prompt=["a", "b"], n=2, max_tokens=2)
        assert [choice.index for choice in many.choices] == [0, 1, 2, 3]
        by_id = api.completions.create(model=MODEL, prompt=[1, 2, 3], max_tokens=2, echo=True)
        assert by_id.usage and by_id.usage.prompt_tokens == 3


@case("completions, streamed")
def completions_stream() -> None:
    with connect("real") as api:
        fields: dict[str, Any] = {"prompt": "The sea", "temperature": 0, "max_tokens": 16}
        whole = api.completions.create(model=MODEL, **fields).choices[0].text
        options = {"include_usage": True}
        *chunks, last = api.completions.create(
            model=MODEL, stream=True, stream_options=options, **fields
        )
        assert "".join(chunk.choices[0].text for chunk in chunks) == whole
        assert last.usage and last.usage.completion_tokens == 16 and not last.choices


@case("chat")
def chat() -> None:
    with connect("real") as api:
        answer = api.chat.completions.create(
            model=MODEL,
            messages=QUESTION,
            temperature=0,
            max_completion_tokens=24,
            logprobs=True,
            top_logprobs=3,
            seed=1,
            user="someone",
            store=False,
            metadata={"a": "b"},
            extra_body={"top_k": 20, "min_p": 0.01},
        )
        choice = answer.choices[0]
        assert "Paris" in (choice.message.content or "")
        assert choice.logprobs and choice.logprobs.content
        assert all(len(token.top_logprobs) == 3 for token in choice.logprobs.content)
        text = b"".join(bytes(token.bytes or []) for token in choice.logprobs.content).decode()
        assert text.startswith(choice.message.content or "?")
        history = [
            *QUESTION,
            choice.message.model_dump(),
            {"role": "user", "content": "And Italy?"},
        ]
        again = api.chat.completions.create(model=MODEL, messages=history, max_tokens=4)
        assert again.usage and again.usage.prompt_tokens > 50


@case("chat, n")
def several() -> None:
    with connect("real") as api:
        fields: dict[str, Any] = {"messages": QUESTION, "n": 3, "max_tokens": 8, "seed": 7}
        answer = api.chat.completions.create(model=MODEL, temperature=1.5, **fields)
        texts = [choice.message.content for choice in answer.choices]
        assert len(texts) == 3 and len(set(texts)) > 1
        streamed = ["", "", ""]
        stream = api.chat.completions.create(model=MODEL, temperature=1.5, stream=True, **fields)
        for chunk in stream:
            for choice in chunk.choices:
                streamed[choice.index] += choice.delta.content or ""
        assert streamed == texts


@case("chat, streamed")
def chat_stream() -> None:
    with connect("real") as api:
        stream = api.chat.completions.create(
            model=MODEL,
            messages=QUESTION,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
        *chunks, last = stream
        assert chunks[0].choices[0].delta.role == "assistant"
        assert "Paris" in "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        ends = [c.choices[0].finish_reason for c in chunks if c.choices[0].finish_reason]
        assert ends == ["stop"]
        assert last.usage and last.usage.completion_tokens > 3


@case("chat.completions.stream")
def chat_stream_helper() -> None:
    with (
        connect("real") as api,
        api.chat.completions.stream(
            model=MODEL, messages=QUESTION, temperature=0, max_tokens=24, logprobs=True
        ) as stream,
    ):
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert {"chunk", "content.delta", "content.done", "logprobs.content.delta"} <= kinds
    assert "Paris" in (final.choices[0].message.content or "")


@case("raw responses and request ids")
def raw() -> None:
    with connect("real") as api:
        raw = api.chat.completions.with_raw_response.create(
            model=MODEL, messages=QUESTION, max_tokens=1, extra_headers={"X-Request-Id": "mine"}
        )
        assert raw.headers["x-request-id"] == "mine"
        assert raw.parse()._request_id == "mine"
        with api.completions.with_streaming_response.create(
            model=MODEL, prompt="a", max_tokens=2, stream=True
        ) as response:
            lines = list(response.iter_lines())
        assert "data: [DONE]" in lines


@case("async")
async def concurrent() -> None:
    async def stream(api: openai.AsyncOpenAI) -> str:
        chunks = await api.chat.completions.create(
            model=MODEL, messages=QUESTION, temperature=0, max_tokens=16, stream=True
        )
        return "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])

    async with connect_async("real") as api:
        assert [model.id async for model in api.models.list()] == [MODEL]
        texts = await asyncio.gather(*(stream(api) for _ in range(6)))
        assert all("Paris" in text for text in texts)
        answer = await api.completions.create(model=MODEL, prompt="a", max_tokens=1)
        assert answer.object == "text_completion"
        response = await api.responses.create(model=MODEL, input="Hello", max_output_tokens=4)
        assert response.output_text
    async with connect_async("embedding") as api:
        vectors = await api.embeddings.create(model=EMBEDDING_MODEL, input=["a", "b"])
        assert len(vectors.data) == 2


@case("tools, auto")
def tools() -> None:
    with connect("echo") as api:
        answer = api.chat.completions.create(
            model=MODEL, messages=say(f"Well.{CALL}{CALL}"), tools=TOOLS, tool_choice="auto"
        )
        (choice,) = answer.choices
        assert choice.finish_reason == "tool_calls"
        assert (choice.message.content or "").strip() == "Well."
        calls = choice.message.tool_calls or []
        assert [json.loads(call.function.arguments) for call in calls] == [{"city": "Köln"}] * 2
        assert len({call.id for call in calls}) == 2
        results: list[Any] = [
            {"role": "tool", "tool_call_id": call.id, "content": "rain"} for call in calls
        ]
        history = [*say("So it rains."), choice.message, *results]
        again = api.chat.completions.create(model=MODEL, messages=history, tools=TOOLS)
        assert again.choices[0].message.content == "So it rains."
        assert again.choices[0].finish_reason == "stop"
        one = api.chat.completions.create(
            model=MODEL, messages=say(CALL * 2), tools=TOOLS, parallel_tool_calls=False
        )
        assert len(one.choices[0].message.tool_calls or []) == 1


@case("tools' results, through the model's own template")
def tool_results() -> None:
    with connect("echo") as api:
        said = api.chat.completions.create(model=MODEL, messages=say(CALL), tools=TOOLS)
    (message,) = [choice.message for choice in said.choices]
    (call,) = message.tool_calls or []
    assert not message.content
    result: Any = {"role": "tool", "tool_call_id": call.id, "content": "rain"}
    with connect("real") as api:
        history = [*QUESTION, message, result, *QUESTION]
        answer = api.chat.completions.create(model=MODEL, messages=history, temperature=0)
        assert answer.choices[0].message.content
        assert answer.usage and answer.usage.prompt_tokens > 60


@case("tools, streamed")
def tools_stream() -> None:
    with (
        connect("echo") as api,
        api.chat.completions.stream(model=MODEL, messages=say(CALL), tools=TOOLS) as stream,
    ):
        kinds = {event.type for event in stream}
        message = stream.get_final_completion().choices[0].message
    assert "tool_calls.function.arguments.done" in kinds
    (call,) = message.tool_calls or []
    assert (call.function.name, json.loads(call.function.arguments)) == (
        "weather",
        {"city": "Köln"},
    )


@case("responses")
def responses() -> None:
    with connect("real") as api:
        answer = api.responses.create(
            model=MODEL,
            input="What is the capital of France?",
            instructions="You are a helpful assistant.",
            temperature=0,
            max_output_tokens=32,
            metadata={"a": "b"},
        )
        assert "Paris" in answer.output_text
        assert answer.usage and answer.usage.total_tokens > 20
        history: list[Any] = [
            {"role": "user", "content": "What is the capital of France?"},
            *[item.model_dump() for item in answer.output],
            {"role": "user", "content": [{"type": "input_text", "text": "And of Italy?"}]},
        ]
        again = api.responses.create(model=MODEL, input=history, max_output_tokens=3)
        assert again.status == "incomplete"
        assert again.incomplete_details and again.incomplete_details.reason == "max_output_tokens"


@case("responses, streamed")
def responses_stream() -> None:
    with connect("real") as api:
        fields: dict[str, Any] = {"input": "What is the capital of France?", "temperature": 0}
        events = list(
            api.responses.create(model=MODEL, stream=True, max_output_tokens=64, **fields)
        )
        assert events[-1].type == "response.completed"
        assert [event.sequence_number for event in events] == list(range(len(events)))
        text = "".join(e.delta for e in events if e.type == "response.output_text.delta")
        with api.responses.stream(model=MODEL, max_output_tokens=64, **fields) as stream:
            stream.until_done()
            assert stream.get_final_response().output_text == text


@case("embeddings")
def embeddings() -> None:
    with connect("embedding") as api:
        texts = ["The weather is lovely today.", "It's so sunny outside!", "He drove home."]
        packed = api.embeddings.create(model=EMBEDDING_MODEL, input=texts)
        plain = api.embeddings.create(model=EMBEDDING_MODEL, input=texts, encoding_format="float")
        a, b, c = (one.embedding for one in packed.data)
        assert len(a) == 384
        for one, other in zip(packed.data, plain.data, strict=True):
            pairs = zip(one.embedding, other.embedding, strict=True)
            assert max(abs(x - y) for x, y in pairs) < 1e-6

        def alike(x: list[float], y: list[float]) -> float:
            return sum(i * j for i, j in zip(x, y, strict=True))

        assert alike(a, b) > alike(a, c)
        assert packed.usage.prompt_tokens > 10


def refused(call: Any, param: str, word: str, **fields: Any) -> None:
    try:
        call(model=MODEL, **fields)
    except openai.BadRequestError as error:
        assert error.param == param, error.param
        assert word in error.message, error.message
        assert error.type == "invalid_request_error"
    else:
        raise AssertionError(f"{param} was accepted")


@refusal("response_format")
def response_format() -> None:
    with connect("real") as api:
        create = api.chat.completions.create
        for kind in ("json_object", "json_schema"):
            value = {"type": kind}
            refused(create, "response_format", "guided", messages=QUESTION, response_format=value)
        parse = api.chat.completions.parse
        refused(parse, "response_format", "guided", messages=QUESTION, response_format=City)
        refused(api.responses.parse, "text", "guided", input="Paris", text_format=City)


@refusal("tool_choice by name, required")
def tool_choice() -> None:
    named = {"type": "function", "function": {"name": "weather"}}
    with connect("echo") as api:
        for choice in ("required", named):
            refused(
                api.chat.completions.create,
                "tool_choice",
                "guided",
                messages=say("a"),
                tools=TOOLS,
                tool_choice=choice,
            )


@refusal("suffix, unknown fields, stored responses, tools in responses")
def fields() -> None:
    with connect("real") as api:
        refused(api.completions.create, "suffix", "suffix", prompt="a", suffix="b")
        unknown = {"nonsense": 1}
        refused(api.completions.create, "nonsense", "unknown field", prompt="a", extra_body=unknown)
        create = api.responses.create
        refused(create, "previous_response_id", "again", input="a", previous_response_id="resp_1")
        tool = {"type": "function", "name": "f", "parameters": {}, "strict": True}
        refused(create, "tools", "/v1/chat/completions", input="a", tools=[tool])


@refusal("embeddings of a model that generates, and the other way round")
def wrong_kind() -> None:
    with connect("real") as api:
        refused(api.embeddings.create, "model", "all-minilm", input="a")
    with connect("embedding") as api:
        try:
            api.completions.create(model=EMBEDDING_MODEL, prompt="a")
        except openai.BadRequestError as error:
            assert error.param == "model", error.param
        else:
            raise AssertionError("an embedding model generates")


@refusal("files, batches, moderations, images (404)")
def not_there() -> None:
    with connect("real") as api:
        calls: list[Any] = [
            lambda: api.files.list(),
            lambda: api.batches.list(),
            lambda: api.moderations.create(input="a"),
            lambda: api.images.generate(prompt="a"),
            lambda: api.responses.retrieve("resp_1"),
        ]
        for call in calls:
            try:
                call()
            except openai.NotFoundError as error:
                assert "there is nothing at" in error.message
            else:
                raise AssertionError("it is there")


def raises(kind: type[Exception], call: Any) -> Any:
    try:
        call()
    except kind as error:
        return error
    raise AssertionError(f"no {kind.__name__}")


@case("errors by class")
def errors() -> None:
    with connect("slow") as api, connect("slow", api_key="wrong") as stranger:
        error = raises(openai.AuthenticationError, lambda: stranger.models.list())
        assert error.code == "invalid_api_key"
        error = raises(openai.NotFoundError, lambda: api.models.retrieve("gpt-none"))
        assert "gpt-none" in error.message
        create = api.chat.completions.create
        raises(openai.NotFoundError, lambda: create(model="gpt-none", messages=QUESTION))
        error = raises(
            openai.BadRequestError,
            lambda: create(model=MODEL, messages=QUESTION, temperature=-1),
        )
        assert error.param == "temperature"
        error = raises(
            openai.BadRequestError,
            lambda: create(model=MODEL, messages=[{"role": "user", "content": "a " * 20000}]),
        )
        assert "8192" in error.message.replace(",", ""), error.message
        stream = raises(
            openai.BadRequestError,
            lambda: create(model=MODEL, messages=[], stream=True),
        )
        assert stream.param == "messages"


@case("rate limit (429)")
def rate_limit() -> None:
    with connect("limited") as api:

        def ask() -> Any:
            return api.completions.create(model=MODEL, prompt="a", max_tokens=1)

        for _ in range(3):
            ask()
        error = raises(openai.RateLimitError, ask)
        assert error.code == "rate_limit_exceeded"
        assert 0 < int(error.response.headers["retry-after"]) <= 60


@case("full (503), and the client's own retries")
def full() -> None:
    with connect("slow") as api, connect("slow", max_retries=5) as patient:

        def ask(api: openai.OpenAI, **fields: Any) -> Any:
            return api.completions.create(model=MODEL, prompt="a", **fields)

        streams = [ask(api, max_tokens=60, stream=True) for _ in range(4)]
        error = raises(openai.InternalServerError, lambda: ask(api, max_tokens=1))
        assert error.status_code == 503
        assert int(error.response.headers["retry-after"]) > 0
        for stream in streams[:2]:
            stream.close()
        assert ask(patient, max_tokens=1).choices
        for stream in streams[2:]:
            assert len(list(stream)) >= 60
    wait_idle("slow")


@case("time-outs and hanging up")
def hanging_up() -> None:
    with connect("slow") as api:
        hasty = api.with_options(timeout=0.3)
        raises(
            openai.APITimeoutError,
            lambda: hasty.completions.create(model=MODEL, prompt="a", max_tokens=4000),
        )
        wait_idle("slow")
        with api.completions.create(
            model=MODEL, prompt="a", max_tokens=4000, stream=True
        ) as stream:
            assert next(stream).choices
        wait_idle("slow")


@case("hanging up, async")
async def cancelling() -> None:
    async with connect_async("slow") as api:
        create = api.completions.create
        task = asyncio.create_task(create(model=MODEL, prompt="a", max_tokens=4000))
        await asyncio.sleep(0.2)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        stream = await create(model=MODEL, prompt="a", max_tokens=4000, stream=True)
        async for _ in stream:
            break
        await stream.close()
    await asyncio.to_thread(wait_idle, "slow")


if __name__ == "__main__":
    run()
