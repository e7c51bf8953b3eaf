"""A prompt, as it travels to the tokenizer."""

from __future__ import annotations

from .message import Message


class TextPrompt(Message, tag="text"):
    text: str
    add_special_tokens: bool = True


class TokensPrompt(Message, tag="tokens"):
    token_ids: bytes  # i32[N]


class ChatPrompt(Message, tag="chat"):
    """Messages for the model's chat template, as the JSON array that the user sent.

    tools: the JSON array of the tools that the user offers, empty for none.
    """

    messages: bytes
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template: str | None = None
    template_kwargs: bytes = b"{}"
    tools: bytes = b""


Prompt = TextPrompt | TokensPrompt | ChatPrompt
