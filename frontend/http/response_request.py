"""What clients may send to /v1/responses, and the chat that becomes of it.

Responses are not stored, so a conversation goes on by sending its items again: what was said to the
model, and the output items of earlier responses, reasoning included.
"""

from __future__ import annotations

from typing import Any, NoReturn

import msgspec

from ...mq.config import ModelSpec
from ...mq.errors import InvalidRequestError
from ...mq.messages import ChatPrompt
from ...mq.sampling_params import SamplingParams
from .protocol import ChatRequest, sift

# As in protocol.py.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "background": (False,),
    "context_management": ([],),
    "conversation": (),
    "include": ([],),
    "max_tool_calls": (),
    "moderation": (),
    "previous_response_id": (),
    "prompt": (),
    "reasoning": ({},),
    "text": ({"format": {"type": "text"}}, {}),
    "tool_choice": ("auto", "none"),
    "tools": ([],),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
}
_NOT_STORED = (
    "responses are not stored here: send the earlier items, output included, again in input"
)
_REASONS = {
    "conversation": _NOT_STORED,
    "previous_response_id": _NOT_STORED,
    "prompt": "there are no stored prompts here: send instructions and input",
    "reasoning": "how a model reasons is not set by the request",
    "text": 'it needs guided decoding; it can only be absent or {"format":{"type":"text"}}',
    "tool_choice": "tools are found in /v1/chat/completions only",
    "tools": "tools are found in /v1/chat/completions only",
    "truncation": "what doesn't fit is refused",
}
_TEXT_PARTS = ("input_text", "output_text")
_FIELDS = {
    "message": {"type", "role", "content", "id", "status", "phase"},
    "reasoning": {"type", "id", "status", "summary", "content"},
    "part": {"type", "text", "annotations", "logprobs"},
}
_ROLES = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}


class ResponseStreamOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    include_obfuscation: bool = False


class ResponseRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """store may be true, as it is by default elsewhere; the answer says that it is false."""

    input: str | list[Any]
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stream: bool = False
    stream_options: ResponseStreamOptions | None = None
    store: bool = False
    metadata: dict[str, str] = {}
    user: str | None = None
    parallel_tool_calls: bool = True
    chat_template_kwargs: dict[str, Any] | None = None
    cache_salt: str = ""
    priority: int = 0

    def chat_prompt(self) -> ChatPrompt:
        """Raises InvalidRequestError."""
        messages = [] if self.instructions is None else [_said("system", self.instructions)]
        if isinstance(self.input, str):
            messages.append(_said("user", self.input))
        else:
            messages += _messages(self.input)
        chat = ChatRequest(messages=messages, chat_template_kwargs=self.chat_template_kwargs)
        return chat.chat_prompt()

    def sampling_params(self, spec: ModelSpec) -> SamplingParams:
        """What the request says, else the model's own defaults, else OpenAI's."""
        fields: dict[str, Any] = {"max_tokens": None, **spec.sampling_defaults}
        for name in ("temperature", "top_p", "top_k", "min_p", "seed"):
            if (value := getattr(self, name)) is not None:
                fields[name] = value
        if (limit := self.max_output_tokens) is not None:
            if limit < 1:
                raise InvalidRequestError(
                    f"max_output_tokens must be an integer of at least 1, got {limit}",
                    param="max_output_tokens",
                )
            fields["max_tokens"] = limit
        return SamplingParams(**fields)


def read_response_request(body: bytes) -> ResponseRequest:
    """Raises InvalidRequestError that names the field at fault."""
    request = sift(body, ResponseRequest, UNSUPPORTED, _REASONS)
    if request.stream_options is not None and not request.stream:
        raise InvalidRequestError("stream_options needs stream to be true", param="stream_options")
    return request


def _messages(items: list[Any]) -> list[dict[str, Any]]:
    """Reasoning belongs to the assistant's message that comes next."""
    if not items:
        raise InvalidRequestError("input must not be an empty list", param="input")
    messages: list[dict[str, Any]] = []
    thoughts = ""
    for i, item in enumerate(items):
        place = f"input[{i}]"
        if not isinstance(item, dict):
            _refuse(place, "a message {role, content}", item)
        fields = {name: value for name, value in item.items() if value is not None}
        if fields.get("type") == "reasoning":
            thoughts += _thoughts(place, fields)
            continue
        message = _message(place, fields)
        if thoughts:
            if message["role"] != "assistant":
                messages.append(_said("assistant", "", thoughts))
            else:
                message["reasoning"] = thoughts
            thoughts = ""
        messages.append(message)
    return [*messages, _said("assistant", "", thoughts)] if thoughts else messages


def _message(place: str, fields: dict[str, Any]) -> dict[str, Any]:
    kind = fields.get("type", "message")
    if kind != "message":
        raise InvalidRequestError(
            f"{place} is of type {str(kind)[:80]!r}; an item can only be a message or reasoning",
            param=place,
        )
    _check_fields(place, fields, "message")
    role = fields.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        _refuse(f"{place}.role", "user, assistant, system or developer", role)
    content = fields.get("content")
    if not isinstance(content, str):
        content = "".join(_texts(f"{place}.content", content, _TEXT_PARTS))
    return _said(_ROLES[role], content)


def _thoughts(place: str, fields: dict[str, Any]) -> str:
    _check_fields(place, fields, "reasoning")
    if fields.get("summary"):
        raise InvalidRequestError(
            f"{place}.summary is not supported: reasoning is read from content",
            param=f"{place}.summary",
        )
    return "".join(_texts(f"{place}.content", fields.get("content", []), ("reasoning_text",)))


def _texts(place: str, parts: Any, kinds: tuple[str, ...]) -> list[str]:
    if not isinstance(parts, list):
        _refuse(place, "a string or a list of parts", parts)
    texts = []
    for i, part in enumerate(parts):
        at = f"{place}[{i}]"
        if not isinstance(part, dict) or not isinstance(part.get("type"), str):
            _refuse(at, f'an object {{"type": "{kinds[0]}", "text": ...}}', part)
        if part["type"] not in kinds:
            raise InvalidRequestError(
                f"{at} is of type {part['type'][:80]!r}; it can only be {' or '.join(kinds)}",
                param=at,
            )
        _check_fields(at, part, "part")
        if not isinstance(part.get("text"), str):
            _refuse(f"{at}.text", "a string", part.get("text"))
        texts.append(part["text"])
    return texts


def _check_fields(place: str, fields: dict[str, Any], kind: str) -> None:
    for name in fields:
        if name not in _FIELDS[kind]:
            shown = f"{place}.{name[:80]}"
            raise InvalidRequestError(f"{shown}: unknown field", param=shown)


def _said(role: str, content: str, reasoning: str = "") -> dict[str, Any]:
    message = {"role": role, "content": content}
    return message | {"reasoning": reasoning} if reasoning else message


def _refuse(place: str, accepted: str, value: Any) -> NoReturn:
    raise InvalidRequestError(f"{place} must be {accepted}, got {repr(value)[:80]}", param=place)
