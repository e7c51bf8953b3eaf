"""The messages of a chat request, checked and brought into the shape that chat templates read."""

from __future__ import annotations

from typing import Any, NoReturn

import msgspec

from ...mq.errors import InvalidRequestError

ChatMessage = dict[str, Any]


class Arguments(dict[str, Any]):
    """A call's arguments, for templates that ask for each of them and for those that add them to a
    text (DeepSeek's), which is given the JSON as the client sent it.
    """

    def __init__(self, fields: dict[str, Any], json: str) -> None:
        super().__init__(fields)
        self._json = json

    def __add__(self, text: str) -> str:
        return self._json + text

    def __radd__(self, text: str) -> str:
        return text + self._json


def parse_messages(data: bytes) -> list[ChatMessage]:
    """Messages from the JSON array a user sent: null fields left out, tools' arguments decoded.

    A content is a string or a list of {"type": "text", "text": ...}. An assistant's message that
    has none gets an empty one, as many templates read it without asking; an empty list of calls is
    left out. Raises InvalidRequestError that names the place.
    """
    try:
        messages = msgspec.json.decode(data)
    except msgspec.DecodeError as error:
        raise InvalidRequestError(f"messages are no valid JSON: {error}", "messages") from None
    if not isinstance(messages, list) or not messages:
        _refuse("messages", "a list of at least one message", messages)
    return [_message(f"messages[{i}]", message) for i, message in enumerate(messages)]


def join_parts(messages: list[ChatMessage]) -> list[ChatMessage]:
    """Contents given in parts as one string each, for templates that expect strings."""
    return [
        message | {"content": "\n".join(part["text"] for part in content)}
        if isinstance(content := message.get("content"), list)
        else message
        for message in messages
    ]


def split_parts(messages: list[ChatMessage]) -> list[ChatMessage]:
    """Contents given as strings as one part each, for templates that expect parts."""
    return [
        message | {"content": [{"type": "text", "text": content}]}
        if isinstance(content := message.get("content"), str)
        else message
        for message in messages
    ]


def _message(place: str, message: Any) -> ChatMessage:
    if not isinstance(message, dict):
        _refuse(place, "an object with a role and a content", message)
    out: ChatMessage = {name: value for name, value in message.items() if value is not None}
    role = out.get("role")
    if not isinstance(role, str) or not role:
        _refuse(f"{place}.role", "a string such as 'system', 'user' or 'assistant'", role)
    content = out.get("content")
    if isinstance(content, list):
        for i, part in enumerate(content):
            _check_part(f"{place}.content[{i}]", part)
    elif content is None and role == "assistant":
        out["content"] = ""
    elif not isinstance(content, str):
        _refuse(f"{place}.content", "a string or a list of text parts", content)
    calls = _tool_calls(f"{place}.tool_calls", out.pop("tool_calls", []))
    return out | {"tool_calls": calls} if calls else out


def _check_part(place: str, part: Any) -> None:
    if not isinstance(part, dict) or not isinstance(part.get("type"), str):
        _refuse(place, 'an object {"type": "text", "text": ...}', part)
    if part["type"] != "text":
        raise InvalidRequestError(
            f"{place} is of type {part['type'][:80]!r}; this model takes parts of type 'text' only",
            place,
        )
    if not isinstance(part.get("text"), str):
        _refuse(f"{place}.text", "a string", part.get("text"))


def _tool_calls(place: str, calls: Any) -> list[Any]:
    """Clients send a call's arguments as JSON text; most templates want the object."""
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        _refuse(place, "a list of objects", calls)
    return [_tool_call(f"{place}[{i}].function.arguments", call) for i, call in enumerate(calls)]


def _tool_call(place: str, call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    text = function["arguments"] or "{}"
    try:
        arguments = msgspec.json.decode(text)
    except msgspec.DecodeError as error:
        raise InvalidRequestError(f"{place} is no valid JSON: {error}", place) from None
    if isinstance(arguments, dict):
        arguments = Arguments(arguments, text)
    return call | {"function": function | {"arguments": arguments}}


def _refuse(place: str, accepted: str, value: Any) -> NoReturn:
    raise InvalidRequestError(f"{place} must be {accepted}, got {repr(value)[:80]}", place)
