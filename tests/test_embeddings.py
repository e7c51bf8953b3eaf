"""Embeddings end to end: a small random BERT served as its users run it, and the real MiniLM."""

from __future__ import annotations

import asyncio
import base64
import os
import signal

import msgspec
import numpy as np
import openai
import pytest
from serving import serve, until
from tiny_bert import CLS, DIMENSION, MAX_LENGTH, SEP, expected, make_tiny_bert
from tiny_model import make_tiny_model

from ringcast import LLM, AsyncLLM, SamplingParams
from ringcast.frontend.cli.main import main
from ringcast.frontend.http.api_docs import TYPES
from ringcast.frontend.hub.cache import models_folder
from ringcast.mq.errors import InvalidRequestError

REAL = "all-minilm-l6-v2"
OPTIONS = {"device": "cpu", "num_threads": 1}
TEXTS = ["a", "hello", "a 1 b 2 c 3", "zzz", "ab " * 20]


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    """The folder, and transformers' model."""
    folder = tmp_path_factory.mktemp("bert")
    return folder, make_tiny_bert(folder)


@pytest.fixture(scope="module")
def server(bert):
    options = ("--device", "cpu", "--num-threads", "1", "--served-model-name", "tiny")
    with serve(bert[0], *options) as server:
        yield server


def assert_near(vector, wanted):
    np.testing.assert_allclose(vector, wanted, atol=1e-5)


def refusal(server, path, body):
    status, answer = server.post(path, body)
    assert status == 400, answer
    return answer["error"]["param"], answer["error"]["message"]


# --- in Python ------------------------------------------------------------------------------------


def test_llm(bert):
    folder, model = bert
    with LLM(str(folder), **OPTIONS) as llm:
        one = llm.embed("a", use_tqdm=False)
        outputs = llm.embed([*TEXTS, [CLS, 9, SEP], {"prompt_token_ids": [5]}] * 40, use_tqdm=False)
        assert len(one) == 1
        assert one[0].prompt == "a"
        assert one[0].prompt_token_ids[0] == CLS
        assert one[0].prompt_token_ids[-1] == SEP
        assert len(outputs) == 280
        for output in outputs[:7]:
            assert output.outputs.hidden_size == DIMENSION
            assert_near(output.outputs.embedding, expected(model, output.prompt_token_ids))
        for output, same in zip(outputs, outputs[7:], strict=False):
            assert output.prompt_token_ids == same.prompt_token_ids
            assert_near(output.outputs.embedding, same.outputs.embedding)
        assert llm.score("a", ["a", "zzz"], use_tqdm=False)[0] == pytest.approx(1, abs=1e-5)
        assert len(llm.embed([list(range(4)) * (MAX_LENGTH // 4)], use_tqdm=False)) == 1
        with pytest.raises(InvalidRequestError, match="65 tokens, but the model's context is 64"):
            llm.embed([[4] * (MAX_LENGTH + 1)], use_tqdm=False)
        for ask in (
            lambda: llm.generate("a", SamplingParams(max_tokens=1), use_tqdm=False),
            lambda: llm.chat([{"role": "user", "content": "a"}], use_tqdm=False),
        ):
            with pytest.raises(InvalidRequestError, match="can't generate text") as caught:
                ask()
            assert caught.value.param == "model"
        with pytest.raises(
            InvalidRequestError, match="one text, or as many as text_2: got 2 and 3"
        ):
            llm.score(["a", "b"], ["a", "b", "c"], use_tqdm=False)


def test_async_llm(bert):
    folder, model = bert

    async def ask():
        async with AsyncLLM(str(folder), **OPTIONS) as llm:
            tasks = [asyncio.create_task(llm.embed([5] * 60)) for _ in range(200)]
            await asyncio.sleep(0)
            for task in tasks[1:]:
                task.cancel()
            await asyncio.wait(tasks)
            assert len(tasks[0].result().outputs.embedding) == DIMENSION
            await llm.client.wait_idle()  # what was cancelled is aborted
            return await llm.embed("zzz", "mine")

    output = asyncio.run(ask())
    assert output.request_id == "mine"
    assert_near(output.outputs.embedding, expected(model, output.prompt_token_ids))


# --- over HTTP ------------------------------------------------------------------------------------


def test_the_openai_client(bert, server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as api:
        answer = api.embeddings.create(model="tiny", input=TEXTS)  # asks for base64
        plain = api.embeddings.create(model="tiny", input=TEXTS, encoding_format="float")
        tokens = api.embeddings.create(model="tiny", input=[[CLS, 7, SEP], [8]], dimensions=48)
    assert [one.index for one in answer.data] == list(range(len(TEXTS)))
    assert answer.model == "tiny"
    assert answer.usage.prompt_tokens == answer.usage.total_tokens > len(TEXTS)
    for one, same in zip(answer.data, plain.data, strict=True):
        assert len(one.embedding) == DIMENSION
        assert_near(one.embedding, same.embedding)
    assert_near(tokens.data[0].embedding, expected(bert[1], [CLS, 7, SEP]))
    assert_near(tokens.data[1].embedding, expected(bert[1], [8]))


def test_embeddings_by_hand(bert, server):
    status, answer = server.post(
        "/v1/embeddings", {"input": [CLS, 7, SEP], "user": "me", "encoding_format": None}
    )
    assert status == 200
    assert answer["object"] == "list"
    (data,) = answer["data"]
    assert (data["object"], data["index"]) == ("embedding", 0)
    assert_near(data["embedding"], expected(bert[1], [CLS, 7, SEP]))
    assert answer["usage"] == {"prompt_tokens": 3, "total_tokens": 3}
    _, again = server.post(
        "/v1/embeddings", {"input": [[CLS, 7, SEP]], "encoding_format": "base64"}
    )
    raw = base64.b64decode(again["data"][0]["embedding"])
    assert_near(np.frombuffer(raw, dtype="<f4"), data["embedding"])
    _, bare = server.post("/v1/embeddings", {"input": "a", "add_special_tokens": False})
    assert bare["usage"]["total_tokens"] == 1


def test_pooling(bert, server):
    status, answer = server.post("/pooling", {"input": [[CLS, 7, SEP]]})
    assert status == 200
    assert answer["data"][0]["object"] == "pooling"
    assert_near(answer["data"][0]["data"], expected(bert[1], [CLS, 7, SEP]))


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/embeddings", {"input": ["a", "b"]}),
        ("/v1/embeddings", {"input": "a", "encoding_format": "base64"}),
        ("/pooling", {"input": "a"}),
        ("/score", {"text_1": "a", "text_2": "b"}),
        ("/rerank", {"query": "a", "documents": ["b", "c"]}),
        ("/rerank", {"query": "a", "documents": ["b"], "return_documents": False}),
    ],
)
def test_answers_have_the_shapes_of_the_openapi_document(server, path, body):
    status, answer = server.post(path, body)
    assert status == 200
    msgspec.convert(answer, TYPES["POST", path][1])


def test_prompts_that_are_cut(bert, server):
    long = {"input": ["a " * 70, "b"]}
    for given, count in ((5, 5 + 3), (-1, 64 + 3)):
        status, answer = server.post("/v1/embeddings", {**long, "truncate_prompt_tokens": given})
        assert (status, answer["usage"]["total_tokens"]) == (200, count)
    _, cut = server.post("/v1/embeddings", {"input": [8, 7, SEP], "truncate_prompt_tokens": 2})
    assert_near(cut["data"][0]["embedding"], expected(bert[1], [7, SEP]))
    body = {"query": "a", "documents": ["a " * 70, "b"]}
    assert refusal(server, "/rerank", body)
    assert server.post("/rerank", {**body, "truncate_prompt_tokens": -1})[0] == 200


@pytest.mark.parametrize("path", ["/score", "/v1/score"])
def test_score(server, path):
    _, vectors = server.post("/v1/embeddings", {"input": ["a", "b 2", "zzz"]})
    a, b, z = (np.array(one["embedding"]) for one in vectors["data"])
    status, answer = server.post(path, {"text_1": "a", "text_2": ["b 2", "zzz", "a"]})
    assert status == 200
    assert [one["index"] for one in answer["data"]] == [0, 1, 2]
    assert_near([one["score"] for one in answer["data"]], [a @ b, a @ z, 1])
    assert answer["usage"]["total_tokens"] > 4
    _, pairs = server.post(path, {"text_1": ["a", "b 2"], "text_2": ["zzz", "zzz"]})
    assert_near([one["score"] for one in pairs["data"]], [a @ z, b @ z])
    param, message = refusal(server, path, {"text_1": ["a", "b"], "text_2": "c"})
    assert param == "text_1"
    assert "got 2 and 1" in message


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_rerank(server, path):
    documents = ["zzz", "a 1", "a 1 b", "q q q"]
    body = {"query": "a 1", "documents": documents}
    status, answer = server.post(path, body)
    assert status == 200
    results = answer["results"]
    scores = [one["relevance_score"] for one in results]
    assert scores == sorted(scores, reverse=True)
    assert scores[0] == pytest.approx(1, abs=1e-5)
    assert results[0]["index"] == 1
    assert [one["document"]["text"] for one in results] == [documents[o["index"]] for o in results]
    _, best = server.post(path, {**body, "top_n": 1, "return_documents": False})
    assert [(one["index"], "document" in one) for one in best["results"]] == [(1, False)]
    assert refusal(server, path, {**body, "top_n": -1})[0] == "top_n"
    assert refusal(server, path, {**body, "documents": []})[0] == "documents"


@pytest.mark.parametrize(
    ("fields", "param", "reason"),
    [
        ({"input": ""}, "input", "is empty"),
        ({"input": []}, "input", "empty list"),
        ({"input": ["a", ""]}, "input[1]", "is empty"),
        ({"input": ["a", 1]}, "input", "must be a string, a list"),
        ({"input": [1, 60]}, "input", "from 0 to 59"),
        ({"input": [[1], []]}, "input[1]", "at least one token"),
        ({"input": [[True]]}, "input[0]", "must be a token id"),
        ({"input": 1}, "input", "expected"),
        ({}, "input", "missing required"),
        ({"input": "a", "dimensions": 8}, "dimensions", "have 48 dimensions"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format", "invalid"),
        ({"input": "a", "truncate_prompt_tokens": 65}, "truncate_prompt_tokens", "1 to 64, got 65"),
        ({"input": "a", "truncate_prompt_tokens": -2}, "truncate_prompt_tokens", "got -2"),
        ({"messages": [{"role": "user", "content": "a"}]}, "messages", "not supported"),
        ({"input": "a", "temperature": 1}, "temperature", "unknown"),
        ({"input": "a", "priority": 1}, "priority", "who came first"),
        ({"input": ["a", "a " * 70]}, "input", "the model's context is 64 tokens"),
    ],
)
def test_refusals_name_the_field(server, fields, param, reason):
    found, message = refusal(server, "/v1/embeddings", fields)
    assert found == param
    assert reason in message


def test_an_embedding_server_does_not_generate(server):
    chat = {"messages": [{"role": "user", "content": "a"}]}
    for path, body in (("/v1/chat/completions", chat), ("/v1/completions", {"prompt": "a"})):
        for stream in (False, True):
            param, message = refusal(server, path, {**body, "stream": stream})
            assert param == "model"
            assert "can't generate text" in message
    assert server.post("/v1/embeddings", {"input": "a", "model": "other"})[0] == 404


# What a batch asks; the last two can't be answered.
BATCH = [
    ("/v1/embeddings", {"input": TEXTS, "model": "tiny"}),
    ("/v1/embeddings", {"input": [CLS, 7, SEP]}),
    ("/pooling", {"input": "a"}),
    ("/score", {"text_1": "a", "text_2": ["b 2", "zzz"]}),
    ("/v1/score", {"text_1": "a", "text_2": "b 2"}),
    ("/rerank", {"query": "a 1", "documents": ["zzz", "a 1"]}),
    ("/v1/rerank", {"query": "a 1", "documents": ["zzz", "a 1"], "top_n": 1}),
    ("/v2/rerank", {"query": "a 1", "documents": ["zzz"], "return_documents": False}),
    ("/v1/embeddings", {"input": "a " * 70}),
    ("/v1/completions", {"prompt": "a"}),
]


def assert_alike(answer, wanted):
    """But for ids and times, and for what numbers owe to those that they were computed with."""
    if isinstance(wanted, dict):
        kept = wanted.keys() - {"id", "created"}
        assert answer.keys() - {"id", "created"} == kept
        for name in kept:
            assert_alike(answer[name], wanted[name])
    elif isinstance(wanted, list):
        assert len(answer) == len(wanted)
        for one, same in zip(answer, wanted, strict=True):
            assert_alike(one, same)
    elif isinstance(wanted, float):
        assert answer == pytest.approx(wanted, abs=1e-5)
    else:
        assert answer == wanted


def test_a_batch_is_answered_as_by_the_server(bert, server, tmp_path, capsys):
    source = tmp_path / "in.jsonl"
    lines = [
        {"custom_id": str(i), "method": "POST", "url": url, "body": body}
        for i, (url, body) in enumerate(BATCH)
    ]
    source.write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
    engine = (str(bert[0]), "--device", "cpu", "--num-threads", "1", "--served-model-name", "tiny")
    answers = [server.post(url, body) for url, body in BATCH]
    usage = [answer["usage"]["total_tokens"] for status, answer in answers if status == 200]
    for number, options in enumerate((engine, ("--url", server.url))):
        output = tmp_path / f"out{number}.jsonl"
        assert main(["batch", str(source), str(output), *options]) == 0
        said = [msgspec.json.decode(line) for line in output.read_bytes().splitlines()]
        for line in said:
            status, wanted = answers[int(line["custom_id"])]
            response = line["response"]
            assert response["status_code"] == status
            if status == 200:
                assert response["request_id"] in response["body"].pop("id")
            assert_alike(response["body"], wanted)
        assert sorted(int(line["custom_id"]) for line in said) == list(range(len(BATCH)))
        counts = f"8 answered, 2 failed; {sum(usage)} prompt and 0 output tokens"
        assert counts in capsys.readouterr().err


def test_a_generation_server_has_no_embeddings(tmp_path):
    with serve(make_tiny_model(tmp_path / "model"), "--device", "fake") as server:
        for path in ("/v1/embeddings", "/pooling", "/score", "/rerank"):
            param, message = refusal(server, path, {"input": "a"})
            assert param == "model"
            assert "generates text" in message


def test_a_worker_that_dies_is_replaced(bert, server):
    os.kill(server.pids()["worker.0"], signal.SIGKILL)
    status, answer = server.post("/v1/embeddings", {"input": [[CLS, 7, SEP]] * 50})
    assert status == 200
    assert len(answer["data"]) == 50
    assert_near(answer["data"][-1]["embedding"], expected(bert[1], [CLS, 7, SEP]))
    until(server.all_ready)


# --- the real one ---------------------------------------------------------------------------------


@pytest.mark.skipif(
    not (models_folder() / REAL / "config.json").exists(),
    reason=f"needs weights: run `ringcast pull {REAL}`",
)
def test_minilm():
    import torch
    from transformers import AutoModel, AutoTokenizer

    texts = [
        "The weather is lovely today.",
        "It's so sunny outside!",
        "He drove to the stadium.",
        "A long text. " * 60,
    ]
    folder = models_folder() / REAL
    with LLM(REAL, device="cpu") as llm:
        outputs = llm.embed(texts, use_tqdm=False)
        same, other = llm.score(texts[0], texts[1:3], use_tqdm=False)
    batch = AutoTokenizer.from_pretrained(folder)(
        texts, padding=True, truncation=False, return_tensors="pt"
    )
    with torch.inference_mode():
        hidden = AutoModel.from_pretrained(folder).eval()(**batch).last_hidden_state
    mask = batch["attention_mask"][..., None].float()
    means = (hidden * mask).sum(1) / mask.sum(1)
    wanted = torch.nn.functional.normalize(means, dim=1)
    vectors = np.array([output.outputs.embedding for output in outputs])
    np.testing.assert_allclose(vectors, wanted.numpy(), atol=1e-4)
    assert same == pytest.approx(0.6660, abs=1e-3)  # as the model's card has it
    assert other == pytest.approx(0.1046, abs=1e-3)
