"""What users may give as a prompt, made into what the tokenizer understands. Used by Python callers and by HTTP alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypedDict

import msgspec

from ..mq import codec
from ..mq.errors import InvalidRequestError
from ..mq.messages import ChatPrompt, Prompt, TextPrompt, TokensPrompt


class TextPromptDict(TypedDict):
    prompt: str


class TokensPromptDict(TypedDict):
    prompt_token_ids: Sequence[int]


UserPrompt = str | TextPromptDict | TokensPromptDict | Sequence[int]

_ACCEPTED = 'a string, {"prompt": text}, {"prompt_token_ids": [ids]}, or a list of token ids'


class TextPart(msgspec.Struct, forbid_unknown_fields=True, tag_field="type", tag="text"):
    text: str


class ChatMessage(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """One message of a conversation, with the fields that chat templates read."""

    role: str
    content: str | list[TextPart]
    name: str | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None


# A reply that a client sends back as history carries these, null or empty. Anything else in them is refused.
_EMPTY_IN_REPLIES = ("refusal", "annotations", "audio", "function_call", "tool_calls", "reasoning")


def to_prompt(prompt: UserPrompt, vocab_size: int) -> Prompt:
    """A user's prompt as a message. Raises InvalidRequestError that names what is wrong with it."""
    if isinstance(prompt, str):
        return text_prompt(prompt)
    if isinstance(prompt, dict):
        fields: dict[str, Any] = dict(prompt)
        if set(fields) == {"prompt"} and isinstance(fields["prompt"], str):
            return text_prompt(fields["prompt"])
        if set(fields) == {"prompt_token_ids"}:
            return tokens_prompt(fields["prompt_token_ids"], vocab_size, "prompt_token_ids")
    elif isinstance(prompt, Sequence) and not isinstance(prompt, bytes):
        return tokens_prompt(prompt, vocab_size, "prompt")
    raise InvalidRequestError(
        f"prompt must be {_ACCEPTED}, got {repr(prompt)[:80]}", param="prompt"
    )


def text_prompt(text: str, add_special_tokens: bool = True) -> TextPrompt:
    _check_text(text, "prompt")
    return TextPrompt(text, add_special_tokens)


def tokens_prompt(ids: Sequence[int], vocab_size: int, param: str) -> TokensPrompt:
    """Token ids as a prompt. Raises InvalidRequestError where there are none, or one that the model doesn't have."""
    for i, token in enumerate(ids):
        # bool is an int, and int subclasses are not worth the doubt.
        if type(token) is not int or not 0 <= token < vocab_size:
            raise InvalidRequestError(
                f"{param}[{i}] must be a token id from 0 to {vocab_size - 1}, got {repr(token)[:80]}",
                param=param,
            )
    if not ids:
        raise InvalidRequestError(f"{param} must have at least one token", param=param)
    return TokensPrompt(codec.pack(ids))


def chat_prompt(
    messages: Any,
    *,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    chat_template: str | None = None,
    template_kwargs: dict[str, Any] | None = None,
) -> ChatPrompt:
    """A conversation as a prompt. Parts of text are joined by newlines, for templates that know only strings."""
    if add_generation_prompt and continue_final_message:
        raise InvalidRequestError(
            "continue_final_message and add_generation_prompt exclude each other: "
            "set add_generation_prompt to false to continue the final message",
            param="continue_final_message",
        )
    return ChatPrompt(
        messages=_json(_read_messages(messages), "messages"),
        add_generation_prompt=add_generation_prompt,
        continue_final_message=continue_final_message,
        chat_template=chat_template,
        template_kwargs=_json(template_kwargs or {}, "chat_template_kwargs"),
    )


def _read_messages(messages: Any) -> list[ChatMessage]:
    if not isinstance(messages, Sequence) or isinstance(messages, (str, bytes)) or not messages:
        raise InvalidRequestError(
            f'messages must be a non-empty list of {{"role": ..., "content": ...}}, '
            f"got {repr(messages)[:80]}",
            param="messages",
        )
    return [_read_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _read_message(message: Any, where: str) -> ChatMessage:
    if isinstance(message, dict):
        message = {
            name: value
            for name, value in message.items()
            if value is not None and not (name in _EMPTY_IN_REPLIES and not value)
        }
    try:
        read = msgspec.convert(message, ChatMessage)
    except msgspec.ValidationError as error:
        raise invalid_field(error, where) from None
    if not isinstance(read.content, str):
        read.content = "\n".join(part.text for part in read.content)
    return read


def invalid_field(error: msgspec.ValidationError, where: str = "") -> InvalidRequestError:
    """msgspec's "reason - at `$.path`" as an error that names the field. `where` is the path of the converted object."""
    reason, _, path = str(error).partition(" - at `$")
    param = (where + path.rstrip("`")).lstrip(".")
    for known in ("unknown field `", "missing required field `"):
        if known in reason:
            name = reason.partition(known)[2].rstrip("`")
            param = f"{param}.{name}" if param else name
            reason = f"{known.split(' field')[0]} field"
    reason = reason[0].lower() + reason[1:]
    return InvalidRequestError(f"{param}: {reason}" if param else reason, param=param or None)


def _check_text(text: str, param: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequestError(
            f"{param} has a lone surrogate at character {error.start}, which no text can have",
            param=param,
        ) from None


def _json(value: Any, param: str) -> bytes:
    try:
        return msgspec.json.encode(value)
    except UnicodeEncodeError as error:
        raise InvalidRequestError(
            f"{param} has a lone surrogate ({error.reason}), which no text can have", param=param
        ) from None
    except TypeError as error:
        raise InvalidRequestError(f"{param} can't be written as JSON: {error}", param=param) from None
