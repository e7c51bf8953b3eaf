"""What Python callers and HTTP clients may give as a prompt, made into what the tokenizer takes."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple, TypedDict

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


class ReadPrompt(NamedTuple):
    """A prompt for the engine, with the text that the user gave, if it was one."""

    prompt: Prompt
    text: str | None = None


def read_prompt(given: Any, vocab_size: int) -> ReadPrompt:
    """A UserPrompt as it was meant. Raises InvalidRequestError that names what is wrong with it."""
    value, param = given, "prompt"
    if isinstance(given, dict) and len(given) == 1:
        ((param, value),) = given.items()
    if isinstance(value, str) and param == "prompt":
        return ReadPrompt(text_prompt(value), text=value)
    if _is_list(value) and (param == "prompt_token_ids" or value is given):
        return ReadPrompt(tokens_prompt(value, vocab_size, param))
    raise InvalidRequestError(f"prompt must be {_ACCEPTED}, got {repr(given)[:80]}", param="prompt")


def is_one_prompt(prompts: Any) -> bool:
    """Whether this is one prompt, or a list of several."""
    return not _is_list(prompts) or (bool(prompts) and all(isinstance(p, int) for p in prompts))


def text_prompt(text: str, add_special_tokens: bool = True) -> TextPrompt:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequestError(
            f"prompt has a lone surrogate at character {error.start}, which no text can have",
            param="prompt",
        ) from None
    return TextPrompt(text, add_special_tokens)


def tokens_prompt(ids: Sequence[int], vocab_size: int, param: str) -> TokensPrompt:
    """Token ids as a prompt. Raises InvalidRequestError for none, and for one the model lacks."""
    packed = _packed(ids, vocab_size)
    if packed is None:
        i, token = next(
            (i, token)
            for i, token in enumerate(ids)
            if type(token) is not int or not 0 <= token < vocab_size
        )
        raise InvalidRequestError(
            f"{param}[{i}] must be a token id from 0 to {vocab_size - 1}, got {repr(token)[:80]}",
            param=param,
        )
    if not ids:
        raise InvalidRequestError(f"{param} must have at least one token", param=param)
    return TokensPrompt(packed)


def _packed(ids: Sequence[int], vocab_size: int) -> bytes | None:
    """Ids as bytes (i32), or None if one is no token id. Not a loop: prompts are long."""
    if not set(map(type, ids)) <= {int}:  # not isinstance: True is an int, and no token id
        return None
    try:
        packed = array("i", ids).tobytes()
    except OverflowError:
        return None
    numbers = codec.ints(packed)
    return packed if not packed or 0 <= numbers.min() <= numbers.max() < vocab_size else None


def chat_prompt(
    messages: Any,
    *,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    chat_template: str | None = None,
    template_kwargs: dict[str, Any] | None = None,
) -> ChatPrompt:
    """A conversation as a prompt. What is in the messages is checked where the template is known.

    Raises InvalidRequestError.
    """
    if not isinstance(messages, list) or not all(isinstance(m, dict) for m in messages):
        raise InvalidRequestError(
            f'messages must be a list of {{"role": ..., "content": ...}}, '
            f"got {repr(messages)[:80]}",
            param="messages",
        )
    if add_generation_prompt and continue_final_message:
        raise InvalidRequestError(
            "continue_final_message and add_generation_prompt exclude each other: "
            "set add_generation_prompt to false to continue the final message",
            param="continue_final_message",
        )
    return ChatPrompt(
        messages=_json(messages, "messages"),
        add_generation_prompt=add_generation_prompt,
        continue_final_message=continue_final_message,
        chat_template=chat_template,
        template_kwargs=_json(template_kwargs or {}, "chat_template_kwargs"),
    )


def _json(value: Any, param: str) -> bytes:
    try:
        return msgspec.json.encode(value)
    except (TypeError, UnicodeEncodeError) as error:
        raise InvalidRequestError(
            f"{param} can't be written as JSON: {error}", param=param
        ) from None


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes))
