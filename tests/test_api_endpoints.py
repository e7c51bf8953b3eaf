"""What a real server says of tokens and prompts: /tokenize, echo, truncation, /v1/responses."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from serving import Server, serve, until
from tiny_model import make_tiny_model

OPTIONS = ("--device", "cpu", "--load-format", "dummy", "--max-model-len", "256")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serve(make_tiny_model(tmp_path_factory.mktemp("tiny")), *OPTIONS) as server:
        yield server


def post(server: Server, path: str, **body: Any) -> dict[str, Any]:
    status, answer = server.post(path, body)
    assert status == 200, answer
    return answer


def tokens_of(server: Server, text: str) -> list[int]:
    answer = post(server, "/tokenize", prompt=text)
    assert answer["count"] == len(answer["tokens"])
    assert answer["max_model_len"] == 256
    return answer["tokens"]


def test_tokens_there_and_back(server: Server) -> None:
    ids = tokens_of(server, "Hé 🌍")
    assert len(ids) == 8
    assert post(server, "/detokenize", tokens=ids) == {"prompt": "Hé 🌍"}
    chat = post(server, "/tokenize", messages=[{"role": "user", "content": "hi"}])
    said = post(server, "/detokenize", tokens=chat["tokens"])["prompt"]
    assert said == "<|user|>hi\n<|assistant|>"


def test_a_prompt_is_scored_the_same_however_it_is_asked(server: Server) -> None:
    ids = tokens_of(server, "the cat")
    fields = {"temperature": 0, "logprobs": 2, "echo": True}
    scored = post(server, "/v1/completions", prompt="the cat", max_tokens=0, **fields)
    more = post(server, "/v1/completions", prompt=ids, max_tokens=3, **fields)
    own = post(server, "/v1/completions", prompt=ids, prompt_logprobs=2, max_tokens=1)
    logprobs = scored["choices"][0]["logprobs"]
    assert scored["choices"][0]["text"] == "the cat"
    assert logprobs["tokens"] == list("the cat")
    assert logprobs["text_offset"] == list(range(7))
    assert logprobs["token_logprobs"][0] is None
    assert scored["usage"]["completion_tokens"] == 0
    (longer,) = more["choices"]
    assert longer["text"].startswith("the cat")
    assert len(longer["logprobs"]["tokens"]) == 10
    for got in (logprobs, longer["logprobs"]):
        assert got["token_logprobs"][1:7] == pytest.approx(
            [
                of[str(token_id)]["logprob"]
                for token_id, of in zip(
                    ids[1:], own["choices"][0]["prompt_logprobs"][1:], strict=True
                )
            ],
            abs=1e-3,
        )


def test_truncation_is_the_same_as_a_shorter_prompt(server: Server) -> None:
    fields = {"temperature": 0, "max_tokens": 8, "return_token_ids": True}
    whole = post(server, "/v1/completions", prompt="x" * 99, truncate_prompt_tokens=9, **fields)
    short = post(server, "/v1/completions", prompt="x" * 9, **fields)
    assert whole["usage"]["prompt_tokens"] == 9
    whole, short = whole["choices"][0], short["choices"][0]
    assert whole["prompt_token_ids"] == short["prompt_token_ids"]
    assert whole["token_ids"] == short["token_ids"]
    fitted = post(server, "/v1/completions", prompt="x" * 999, truncate_prompt_tokens=-1, **fields)
    assert fitted["usage"]["prompt_tokens"] == 248
    status, answer = server.post("/v1/completions", {"prompt": "x" * 999})
    assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")


def test_token_names_in_a_stream(server: Server) -> None:
    fields = {"prompt": "a", "temperature": 0, "max_tokens": 5, "return_tokens_as_token_ids": True}
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as api:
        model = api.models.list().data[0].id
        whole = post(server, "/v1/completions", logprobs=0, return_token_ids=True, **fields)
        del fields["return_tokens_as_token_ids"]
        stream = api.completions.create(
            model=model,
            stream=True,
            logprobs=0,
            extra_body={"return_tokens_as_token_ids": True},
            **fields,
        )
        logprobs = [chunk.choices[0].logprobs for chunk in stream]
    names = [name for each in logprobs if each for name in each.tokens or []]
    assert names == [f"token_id:{token_id}" for token_id in whole["choices"][0]["token_ids"]]
    assert whole["choices"][0]["logprobs"]["tokens"] == names


def test_responses(server: Server) -> None:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as api:
        fields: dict[str, Any] = {
            "model": api.models.list().data[0].id,
            "input": "hi",
            "temperature": 0,
            "max_output_tokens": 12,
            "instructions": "Be brief.",
        }
        whole = api.responses.create(**fields)
        *_, last = api.responses.create(stream=True, **fields)
    assert last.type in ("response.completed", "response.incomplete")
    assert last.response.output_text == whole.output_text
    assert last.response.usage is not None
    assert last.response.usage.input_tokens > len("hiBe brief.")


def test_a_dead_tokenizer_answers_when_it_is_back(server: Server) -> None:
    pid = server.pids()["tokenizer.0"]
    os.kill(pid, signal.SIGKILL)
    assert len(tokens_of(server, "abc")) == 3
    until(server.all_ready)
    assert server.pids()["tokenizer.0"] != pid
