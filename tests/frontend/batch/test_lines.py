"""Lines of batch files: what can be asked, what is refused and how, what is read again."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from ringcast.frontend.batch.endpoints import ENDPOINTS
from ringcast.frontend.batch.lines import (
    OUTPUT_START,
    BatchResponse,
    LineError,
    Outcome,
    custom_id_of,
    error_line,
    read_line,
    read_outcome,
    response_line,
)

GOOD = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "hi"}}


def as_line(**changes: Any) -> bytes:
    fields = {k: v for k, v in {**GOOD, **changes}.items() if v is not ...}
    return json.dumps(fields).encode() + b"\n"


def test_a_request() -> None:
    asked = read_line(as_line(body={"prompt": ["\u00e9"], "stream": False}), 3, False)
    assert (asked.custom_id, asked.url) == ("a", "/v1/completions")
    assert json.loads(asked.body) == {"prompt": ["\u00e9"], "stream": False}
    assert read_line(as_line(more="fields"), 1, False).custom_id == "a"


@pytest.mark.parametrize("url", ENDPOINTS)
def test_every_endpoint_can_be_asked(url: str) -> None:
    assert read_line(as_line(url=url), 1, False).url == url


@pytest.mark.parametrize("body", [[1], "text", 7, None])
def test_what_is_wrong_with_a_body_is_said_by_whoever_answers(body: Any) -> None:
    assert json.loads(read_line(as_line(body=body), 1, False).body) == body


@pytest.mark.parametrize(
    ("line", "code", "param", "words"),
    [
        (b"{", "invalid_json_line", None, "line 9: no JSON: "),
        (b"\xff\xfe\n", "invalid_json_line", None, "line 9: no JSON: "),
        (b"[" * 100_000, "invalid_line", None, "must be a JSON object"),
        (b'{"body":' + b"[" * 100_000, "invalid_json_line", None, "no JSON: "),
        (b"[1]\n", "invalid_line", None, "line 9: must be a JSON object"),
        (as_line(custom_id=...), "missing_custom_id", "custom_id", "custom_id is missing"),
        (as_line(custom_id=3), "invalid_custom_id", "custom_id", "string that isn't empty, got 3"),
        (as_line(custom_id=""), "invalid_custom_id", "custom_id", "got ''"),
        (as_line(method=...), "invalid_method", "method", "must be POST, it is missing"),
        (as_line(method="GET"), "invalid_method", "method", "must be POST, got 'GET'"),
        (as_line(url="/v1/models"), "invalid_url", "url", "/v1/chat/completions or /v1/compl"),
        (as_line(url="/v1/audio/speech"), "invalid_url", "url", "or /v2/rerank, got '/v1/audio/"),
        (as_line(url=["/v1/completions"]), "invalid_url", "url", "got ['/v1/completions']"),
        (as_line(body=...), "missing_body", "body", "body is missing"),
        (as_line(body={"stream": True}), "invalid_stream", "body.stream", "absent or false"),
    ],
)
def test_a_line_that_cant_be_asked(line: bytes, code: str, param: str | None, words: str) -> None:
    with pytest.raises(LineError) as caught:
        read_line(line, 9, False)
    written = json.loads(error_line(caught.value, 9))
    assert written.pop("id").startswith("batch_req_")
    error = written.pop("error")
    usable = param is not None and param != "custom_id"
    assert written == {"custom_id": "a" if usable else None, "response": None}
    assert (error["code"], error["param"], error["line"]) == (code, param, 9)
    assert error["message"].startswith("line 9: ")
    assert words in error["message"]


def test_a_duplicate_is_answered_without_its_custom_id() -> None:
    with pytest.raises(LineError, match=r"line 4: custom_id 'a' is that of an earlier line") as e:
        read_line(as_line(), 4, True)
    written = error_line(e.value, 4)
    assert json.loads(written)["custom_id"] is None
    assert read_outcome(written) == Outcome(None, 0, 4)


def test_custom_ids() -> None:
    assert custom_id_of(as_line(custom_id="é")) == "é"
    for bad in (
        b"{",
        b"7",
        b"",
        as_line(custom_id=7),
        as_line(custom_id=""),
        as_line(custom_id=...),
    ):
        assert custom_id_of(bad) is None


def test_a_response() -> None:
    body = b'{"choices":[],"usage":{"prompt_tokens":1}}'
    written = response_line("a\n", BatchResponse(200, "r1", msgspec.Raw(body)))
    assert written.startswith(OUTPUT_START)
    assert written.endswith(b"\n")
    assert written.count(b"\n") == 1
    assert json.loads(written) | {"id": ""} == {
        "id": "",
        "custom_id": "a\n",
        "response": {"status_code": 200, "request_id": "r1", "body": json.loads(body)},
        "error": None,
    }
    assert read_outcome(written) == Outcome("a\n", 200, 0)
    ids = {
        json.loads(response_line("a", BatchResponse(200, "r", msgspec.Raw(b"1"))))["id"]
        for _ in range(9)
    }
    assert len(ids) == 9


@pytest.mark.parametrize(
    "line",
    [
        b"{}\n",
        b"hello\n",
        b"[]\n",
        b'{"id":"x","custom_id":"a","response":null,"error":null}\n',
        b'{"id":"batch_req_1","custom_id":7,"response":null,"error":null}\n',
        b'{"id":"batch_req_1","custom_id":"a","response":{},"error":null}\n',
        b'{"id":"batch_req_1","custom_id":"a","response":null,"err\n',
    ],
)
def test_what_is_no_line_of_an_output(line: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        read_outcome(line)
