"""The lines of batch files, as OpenAI has them.

A request, all four fields of which are needed:

    {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {...}}

Its answer. `response` is what the HTTP server would have sent, errors included:

    {"id": "batch_req_<hex>", "custom_id": "a", "error": null,
     "response": {"status_code": 200, "request_id": "<hex>", "body": {...}}}

What can't be asked at all has an `error` instead. A line whose custom_id is missing, or has been
used by a line before, is answered with custom_id null, so that an id is never in an output twice:

    {"id": "batch_req_<hex>", "custom_id": null, "response": null,
     "error": {"code": "duplicate_custom_id", "message": "line 7: ...", "param": ..., "line": 7}}
"""

from __future__ import annotations

import uuid
from typing import Any

import msgspec

from ...mq.errors import InvalidRequestError
from .endpoints import ENDPOINTS

OUTPUT_START = b'{"id":"batch_req_'
"""How every line of an output begins."""

_ID_PREFIX = "batch_req_"


class BatchRequest(msgspec.Struct):
    """A line that can be asked. body: JSON as it stood there, not yet looked into."""

    custom_id: str
    url: str
    body: bytes


class BatchResponse(msgspec.Struct):
    """body: JSON without line breaks."""

    status_code: int
    request_id: str
    body: msgspec.Raw


class BatchError(msgspec.Struct):
    code: str
    message: str
    param: str | None
    line: int


class Outcome(msgspec.Struct):
    """What is read again of an output's line. status_code: 0 where nothing was asked.

    line: of the input, where the custom_id doesn't say which.
    """

    custom_id: str | None
    status_code: int
    line: int


class LineError(InvalidRequestError):
    """A line that can't be asked. custom_id: its own, if it may be used in an output."""

    def __init__(self, message: str, code: str, param: str | None, custom_id: str | None) -> None:
        super().__init__(message, param, code)
        self.custom_id = custom_id


class _InputLine(msgspec.Struct):
    custom_id: Any = None
    method: Any = None
    url: Any = None
    body: msgspec.Raw = msgspec.Raw()


class _StreamField(msgspec.Struct):
    stream: Any = None


class _OutputLine(msgspec.Struct):
    id: str
    custom_id: str | None
    response: BatchResponse | None
    error: BatchError | None


class _StatusField(msgspec.Struct):
    status_code: int


class _LineField(msgspec.Struct):
    line: int = 0


class _PastLine(msgspec.Struct):
    id: str
    custom_id: str | None
    response: _StatusField | None
    error: _LineField | None


_read_input = msgspec.json.Decoder(_InputLine).decode
_read_output = msgspec.json.Decoder(_PastLine).decode
_read_stream = msgspec.json.Decoder(_StreamField).decode


def custom_id_of(line: bytes) -> str | None:
    """None if the line has none that can be used."""
    try:
        found = _read_input(line).custom_id
    except (msgspec.DecodeError, RecursionError):
        return None
    return found if isinstance(found, str) and found else None


def read_line(line: bytes, number: int, duplicate: bool) -> BatchRequest:
    """A line of an input. number: its own, from 1. duplicate: an earlier line has its custom_id.

    Raises LineError.
    """
    where = f"line {number}"
    try:
        asked = _read_input(line)
    except msgspec.ValidationError:
        raise LineError(f"{where}: must be a JSON object", "invalid_line", None, None) from None
    except (msgspec.DecodeError, RecursionError) as error:
        raise LineError(f"{where}: no JSON: {error}", "invalid_json_line", None, None) from None
    custom_id = _custom_id(asked.custom_id, where, duplicate)
    for name, value, allowed in (
        ("method", asked.method, ("POST",)),
        ("url", asked.url, tuple(ENDPOINTS)),
    ):
        if value not in allowed:
            said = "it is missing" if value is None else f"got {repr(value)[:80]}"
            message = f"{where}: {name} must be {' or '.join(allowed)}, {said}"
            raise LineError(message, f"invalid_{name}", name, custom_id)
    body = bytes(asked.body)
    if not body:
        raise LineError(f"{where}: body is missing", "missing_body", "body", custom_id)
    if _is_streaming(body):
        message = f"{where}: body.stream must be absent or false: an answer here is one line"
        raise LineError(message, "invalid_stream", "body.stream", custom_id)
    return BatchRequest(custom_id, asked.url, body)


def response_line(custom_id: str, response: BatchResponse) -> bytes:
    return _write(_OutputLine(_new_id(), custom_id, response, None))


def error_line(error: LineError, number: int) -> bytes:
    problem = BatchError(error.code or "invalid_line", str(error), error.param, number)
    return _write(_OutputLine(_new_id(), error.custom_id, None, problem))


def read_outcome(line: bytes) -> Outcome:
    """A line of an output. Raises ValueError if it is none."""
    past = _read_output(line)
    if not past.id.startswith(_ID_PREFIX):
        raise ValueError(f"id must begin with {_ID_PREFIX}, got {past.id[:80]!r}")
    status = past.response.status_code if past.response is not None else 0
    return Outcome(past.custom_id, status, past.error.line if past.error is not None else 0)


def _custom_id(given: Any, where: str, duplicate: bool) -> str:
    if given is None:
        message = f"{where}: custom_id is missing"
        raise LineError(message, "missing_custom_id", "custom_id", None)
    if not isinstance(given, str) or not given:
        message = f"{where}: custom_id must be a string that isn't empty, got {repr(given)[:80]}"
        raise LineError(message, "invalid_custom_id", "custom_id", None)
    if duplicate:
        message = f"{where}: custom_id {given[:200]!r} is that of an earlier line"
        raise LineError(message, "duplicate_custom_id", "custom_id", None)
    return given


def _is_streaming(body: bytes) -> bool:
    try:
        return _read_stream(body).stream is True
    except (msgspec.DecodeError, RecursionError):  # whoever answers says what is wrong with it
        return False


def _new_id() -> str:
    return _ID_PREFIX + uuid.uuid4().hex


def _write(line: _OutputLine) -> bytes:
    return msgspec.json.encode(line) + b"\n"
