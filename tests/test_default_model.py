"""The default model, served as its users run it: the openai client gets a sensible answer."""

from __future__ import annotations

import pytest
from openai import OpenAI
from serving import serve

pytestmark = pytest.mark.model
MODEL = "smollm2-135m-instruct"
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def client():
    with (
        serve(MODEL, "--max-model-len", "2048") as server,
        OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


def test_a_streamed_answer(client):
    stream = client.chat.completions.create(
        model=MODEL,
        messages=QUESTION,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    *chunks, last = list(stream)
    assert "Paris" in "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert last.usage.completion_tokens == len(chunks)


def test_the_same_question_again_finds_its_prompt_cached(client):
    first, second = (
        client.chat.completions.create(model=MODEL, messages=QUESTION, temperature=0, max_tokens=8)
        for _ in range(2)
    )
    assert first.choices[0].message.content == second.choices[0].message.content
    assert second.usage.prompt_tokens_details.cached_tokens >= 32


def test_choices_differ_by_seed_and_repeat_with_it(client):
    def choices(seed):
        answer = client.completions.create(
            model=MODEL, prompt="Once upon a time", temperature=1, n=3, seed=seed, max_tokens=12
        )
        return [choice.text for choice in answer.choices]

    assert len(set(choices(1))) == 3
    assert choices(1) == choices(1)


def test_stop_strings_and_logprobs(client):
    answer = client.completions.create(
        model=MODEL, prompt="1, 2, 3, 4,", temperature=0, max_tokens=40, stop=["8"], logprobs=2
    )
    choice = answer.choices[0]
    assert choice.text.startswith(" 5, 6, 7")
    assert "8" not in choice.text
    assert choice.finish_reason == "stop"
    assert all(value <= 0 for value in choice.logprobs.token_logprobs)
