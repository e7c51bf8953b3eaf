"""What the endpoints refuse, and how: OpenAI's error shape, with the field by name."""

from __future__ import annotations

import asyncio
import gzip
import io
import json
from typing import Any

import pytest

from ringcast.frontend.client import EngineClient
from ringcast.mq.errors import EngineDeadError
from ringcast.mq.messages import ErrorInfo

CHAT = {"messages": [{"role": "user", "content": "hi"}]}
COMPLETION = {"prompt": "hi"}


async def refused(server: Any, path: str, body: Any, method: str = "POST") -> tuple[int, Any]:
    data = json.dumps(body) if isinstance(body, dict) else body
    async with server.http.request(method, path, data=data) as answer:
        assert answer.content_type == "application/json"
        got = await answer.json()
        assert set(got) == {"error"}
        assert set(got["error"]) == {"message", "type", "param", "code"}
        return answer.status, got["error"]


@pytest.mark.parametrize(
    ("change", "param", "words"),
    [
        ({"no_such": 1}, "no_such", "unknown field"),
        ({"": 1}, '""', "unknown field"),
        ({"max_tokens": "many"}, "max_tokens", "expected `int"),
        ({"temperature": True}, "temperature", "expected `float"),
        ({"temperature": -1}, "temperature", "at least 0"),
        ({"top_p": 0}, "top_p", "above 0"),
        ({"n": 0}, "n", "from 1 to 128"),
        ({"n": 129}, "n", "from 1 to 128"),
        ({"max_tokens": 0}, "max_tokens", "at least 1"),
        ({"min_tokens": 17, "max_tokens": 16}, "min_tokens", "at most max_tokens"),
        ({"seed": 2**64}, "seed", "64 bits"),
        ({"stop": [""]}, "stop", "non-empty"),
        ({"stop": 5}, "stop", "expected `str | array"),
        ({"stop": ["a", 5]}, "stop[1]", "expected `str`"),
        ({"stop_token_ids": [-1]}, "stop_token_ids", "token ids"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "stream"),
        (
            {"stream": True, "stream_options": {"every": 1}},
            "stream_options.every",
            "unknown field",
        ),
        ({"logit_bias": {"5": 101}}, "logit_bias", "from -100 to 100"),
        ({"logit_bias": {"five": 1}}, "logit_bias", "the key 'five'"),
        ({"logit_bias": {"-5": 1}}, "logit_bias", "by token id"),
        ({"logit_bias": [5]}, "logit_bias", "expected `object"),
        ({"frequency_penalty": 2.5}, "frequency_penalty", "from -2 to 2"),
        ({"frequency_penalty": False}, "frequency_penalty", "expected `float"),
        ({"presence_penalty": -2.1}, "presence_penalty", "from -2 to 2"),
        ({"repetition_penalty": 0}, "repetition_penalty", "above 0"),
        ({"allowed_token_ids": []}, "allowed_token_ids", "at least one"),
        ({"allowed_token_ids": [-1]}, "allowed_token_ids", "token ids"),
        ({"bad_words": "no"}, "bad_words", "expected `array"),
        ({"bad_words": [""]}, "bad_words", "non-empty"),
        ({"prompt_logprobs": 21}, "prompt_logprobs", "from 0 to 20"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "can't be streamed"),
        ({"vllm_xargs": 1}, "vllm_xargs", "expected `object"),
        ({"vllm_xargs": {"a": 2**64}}, "vllm_xargs", "integers of 64 bits"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "from 1 to 512"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens", "must be -1 or"),
        ({"truncate_prompt_tokens": 513}, "truncate_prompt_tokens", "from 1 to 512"),
        ({"return_token_ids": True, "stream": True}, "return_token_ids", "can't be streamed"),
        (
            {"stream": True, "stream_options": {"continuous_usage_stats": True}},
            "stream_options.continuous_usage_stats",
            "include_usage",
        ),
        ({"priority": 1}, "priority", "--scheduling-policy priority"),
        ({"priority": 2**63}, "priority", "64 bits"),
        ({"priority": 0.5}, "priority", "expected `int"),
        ({"guided_regex": "a+"}, "guided_regex", "not supported yet"),
        ({"use_beam_search": True}, "use_beam_search", "LLM.beam_search in Python"),
        ({"cache_salt": 1}, "cache_salt", "expected `str`"),
    ],
)
async def test_fields_of_both(serve: Any, change: Any, param: str, words: str) -> None:
    async with serve() as server:
        for path, body in (("/v1/chat/completions", CHAT), ("/v1/completions", COMPLETION)):
            status, error = await refused(server, path, {**body, **change})
            assert (status, error["param"]) == (400, param), error
            assert words in error["message"]
            assert param in error["message"]
            assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"tools": {}}, "tools"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"functions": [{}]}, "functions"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"chat_template": "{{ messages }}"}, "chat_template"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": 5}, "logprobs"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"max_completion_tokens": 5, "max_tokens": 6}, "max_completion_tokens"),
        ({"messages": "hi"}, "messages"),
        ({"messages": ["hi"]}, "messages[0]"),
        ({"messages": None}, "messages"),
        ({"prompt": "hi"}, "prompt"),
        (
            {"add_generation_prompt": True, "continue_final_message": True},
            "continue_final_message",
        ),
        ({"chat_template_kwargs": 3}, "chat_template_kwargs"),
    ],
)
async def test_fields_of_chat(serve: Any, engine: Any, change: Any, param: str) -> None:
    async with serve() as server:
        status, error = await refused(server, "/v1/chat/completions", {**CHAT, **change})
    assert (status, error["param"]) == (400, param), error
    assert engine.sent == []


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ["a", 5]}, "prompt"),
        ({"prompt": [1.5]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": [1000]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [2**70]}, "prompt"),
        ({"prompt": [[1], []]}, "prompt[1]"),
        ({"prompt": [[1], ["a"]]}, "prompt[1]"),
        ({"prompt": ["hi"] * 201}, "prompt"),
        ({"echo": "yes"}, "echo"),
        ({"echo": True, "logprobs": 1, "stream": True}, "echo"),
        ({"echo": True, "max_tokens": 0, "stream": True}, "echo"),
        ({"echo": True, "truncate_prompt_tokens": 5}, "echo"),
        ({"echo": True, "logprobs": 1, "prompt_logprobs": 2}, "prompt_logprobs"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 2}, "best_of"),
        ({"best_of": 3, "n": 2}, "best_of"),
        ({"logprobs": 21}, "logprobs"),
        ({"messages": []}, "messages"),
    ],
)
async def test_fields_of_completions(serve: Any, engine: Any, change: Any, param: str) -> None:
    async with serve() as server:
        status, error = await refused(server, "/v1/completions", {**COMPLETION, **change})
    assert (status, error["param"]) == (400, param), error
    assert engine.sent == []


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[1]",
        b"null",
        b"\x00",
        b"[" * 5000,
        b'{"prompt": "\xff"}',
        b'{"temperature": NaN}',
        b'{"temperature": 1e999}',
    ],
)
async def test_bodies_that_are_no_json_object(serve: Any, body: bytes) -> None:
    async with serve() as server:
        status, error = await refused(server, "/v1/completions", body)
    assert (status, error["type"]) == (400, "invalid_request_error")
    assert error["message"].startswith(("the body is not JSON", "the body must be a JSON object"))


async def test_paths_methods_and_models_that_are_not_there(serve: Any) -> None:
    async with serve() as server:
        status, error = await refused(server, "/v1/nothing", None)
        assert (status, error["type"]) == (404, "not_found_error")
        assert "/v1/nothing" in error["message"]
        status, error = await refused(server, "/v1/completions", None, "GET")
        assert status == 405
        assert "POST, not GET" in error["message"]
        status, error = await refused(server, "/v1/completions", {"model": "x", "prompt": "hi"})
        assert (status, error["param"]) == (404, "model")
        assert "this server has fake-model" in error["message"]
        status, error = await refused(server, "/v1/models/x", None, "GET")
        assert (status, error["param"]) == (404, "model")


async def test_a_body_over_the_limit(serve: Any, engine: Any) -> None:
    async with serve() as server:
        body = io.BytesIO(json.dumps({"prompt": "x" * 10_000_000}).encode())
        status, error = await refused(server, "/v1/completions", body)
        assert status == 413
        assert "4194304 bytes" in error["message"]
        assert (await refused(server, "/v1/completions", {"prompt": 1}))[0] == 400
    assert engine.sent == []


@pytest.mark.parametrize("coding", ["gzip", "br", "nonsense"])
async def test_a_body_that_is_coded(serve: Any, engine: Any, coding: str) -> None:
    body = gzip.compress(b'{"prompt": "hi"}')
    headers = {"Content-Encoding": coding}
    async with serve() as server:
        async with server.http.post("/v1/completions", data=body, headers=headers) as answer:
            assert answer.status == 415
            assert "Content-Encoding" in (await answer.json())["error"]["message"]
        plain = {"Content-Encoding": "identity"}
        body = b'{"prompt": "hi"}'
        async with server.http.post("/v1/completions", data=body, headers=plain) as answer:
            assert answer.status == 200
    assert len(engine.generated) == 1


async def test_request_ids_that_could_do_harm(serve: Any) -> None:
    async with serve() as server:
        headers = {"X-Request-Id": "a b"}
        async with server.http.post("/v1/completions", json=COMPLETION, headers=headers) as answer:
            assert answer.status == 400
            assert (await answer.json())["error"]["param"] == "X-Request-Id"


@pytest.mark.parametrize("stream", [False, True])
async def test_what_the_tokenizer_refuses(serve: Any, engine: Any, stream: bool) -> None:
    engine.reject = ErrorInfo(
        "too long: 600 > 512", 400, param="messages", code="context_length_exceeded"
    )
    async with serve() as server:
        body = {**CHAT, "stream": stream}
        status, error = await refused(server, "/v1/chat/completions", body)
    assert status == 400
    assert error == {
        "message": "too long: 600 > 512",
        "type": "invalid_request_error",
        "param": "messages",
        "code": "context_length_exceeded",
    }


async def test_one_refused_prompt_of_several_aborts_the_others(serve: Any, engine: Any) -> None:
    engine.reject = ErrorInfo("no", 400, param="prompt")
    async with serve() as server:
        status, _ = await refused(server, "/v1/completions", {"prompt": ["a", "b", "c"]})
    assert status == 400
    assert len(engine.generated) == 3


async def test_a_failure_before_the_first_byte_is_a_500(serve: Any, engine: Any) -> None:
    engine.fail = ErrorInfo("the worker stumbled", 500, "internal_server_error")
    engine.words = []
    async with serve() as server:
        for stream in (False, True):
            body = {**CHAT, "stream": stream}
            status, error = await refused(server, "/v1/chat/completions", body)
            assert (status, error["type"]) == (500, "internal_server_error")
            assert error["message"] == "the worker stumbled"


async def test_a_failure_after_the_first_byte_is_the_last_event(serve: Any, engine: Any) -> None:
    engine.fail = ErrorInfo("the worker stumbled", 500, "internal_server_error")
    async with serve() as server:
        body = {**CHAT, "stream": True}
        async with server.http.post("/v1/chat/completions", json=body) as answer:
            assert answer.status == 200
            *events, last, end = (await answer.text()).split("\n\n")
    assert len(events) == 5
    assert json.loads(last.removeprefix("data: "))["error"]["message"] == "the worker stumbled"
    assert end == ""


async def test_overload_is_a_503_with_retry_after(serve: Any, client: EngineClient) -> None:
    client.max_num_queued_reqs = 2
    async with serve() as server:
        status, error = await refused(server, "/v1/completions", {"prompt": ["a"] * 3})
        assert (status, error["param"]) == (400, "prompt")
        held = [client.submit(*held_request()) for _ in range(2)]
        async with server.http.post("/v1/completions", json=COMPLETION) as answer:
            assert answer.status == 503
            assert answer.headers["Retry-After"] == "1"
            assert (await answer.json())["error"]["type"] == "overloaded_error"
        for handle in held:
            handle.discard()


async def test_several_prompts_get_room_for_all_or_none(
    serve: Any, client: EngineClient, engine: Any
) -> None:
    client.max_num_queued_reqs = 3
    async with serve() as server:
        engine.hold = 0
        with client.submit(*held_request()):
            status, _ = await refused(server, "/v1/completions", {"prompt": ["a"] * 3})
    assert status == 503
    assert len(engine.generated) == 1


async def test_a_draining_server_ends_what_runs_and_refuses_the_rest(
    serve: Any, client: EngineClient, engine: Any
) -> None:
    engine.hold = 3
    async with serve() as server:
        body = {**CHAT, "stream": True}
        async with server.http.post("/v1/chat/completions", json=body) as running:
            client.draining = True
            status, error = await refused(server, "/v1/chat/completions", CHAT)
            assert status == 503
            assert "shutting down" in error["message"]
            engine.hold = None
            assert (await running.text()).endswith("data: [DONE]\n\n")


async def test_a_dead_engine(serve: Any, until: Any, client: EngineClient, engine: Any) -> None:
    engine.hold = 1
    async with serve() as server:
        waiting = asyncio.create_task(refused(server, "/v1/chat/completions", CHAT))
        body = {**CHAT, "stream": True}
        async with server.http.post("/v1/chat/completions", json=body) as streaming:
            first = await streaming.content.readuntil(b"\n\n")
            assert b"Hello" in first
            await until(lambda: len(engine.generated) == 2)
            client.fail_all(EngineDeadError("worker.0 died", "IndexError: boom"))
            rest = await streaming.text()
        assert "worker.0 died\\nIndexError: boom" in rest
        assert "[DONE]" not in rest
        status, error = await waiting
        assert (status, error["type"]) == (500, "internal_server_error")
        assert (await refused(server, "/health", None, "GET"))[0] == 503
        assert (await refused(server, "/v1/chat/completions", CHAT))[0] == 500
        engine.hold = None


async def test_an_error_of_ours_is_a_500_and_is_logged(
    serve: Any, client: EngineClient, caplog: pytest.LogCaptureFixture
) -> None:
    client.submit = None  # type: ignore[assignment,method-assign]
    async with serve() as server:
        status, error = await refused(server, "/v1/completions", COMPLETION)
    assert (status, error["type"]) == (500, "internal_server_error")
    assert "TypeError" in error["message"]
    assert "TypeError" in caplog.text


@pytest.mark.parametrize(
    "said",
    [
        b"\x00\xff\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: nonsense\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n" + b"X: " + b"y" * 100_000 + b"\r\n\r\n",
        b"GET /health HTTP/1.1\r\n",
    ],
)
async def test_what_is_no_request_disturbs_nobody(serve: Any, said: bytes) -> None:
    async with serve() as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(said)
        writer.write_eof()
        assert b" 200 " not in await reader.read()
        writer.close()
        async with server.http.get("/health") as answer:
            assert answer.status == 200


def held_request() -> tuple[Any, Any]:
    from ringcast.mq.messages import TextPrompt
    from ringcast.mq.sampling_params import SamplingParams

    return TextPrompt("x"), SamplingParams()
