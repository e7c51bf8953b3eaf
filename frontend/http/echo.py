"""A prompt that is repeated before its completions (`echo`), with log-probabilities if asked for.

Text comes back as it was given; of token ids, the tokenizer makes it. The first token has no
log-probability. One that the tokenizer has put before the text (BOS) has no length in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from ...actors.text.event_renderer import completion_logprobs
from ...actors.text.logprob_rows import LogprobRow, token_id_name
from ...mq import codec
from ...mq.errors import InvalidRequestError
from ...mq.messages import Prompt, TextPrompt, TokensPrompt
from ..client import EngineClient
from ..handle import RequestHandle


class Echo(msgspec.Struct):
    """text: the prompt's. alone: nothing comes after it.

    first_token, rows: the name of its first token, and the log-probabilities of the others.
    """

    text: str
    alone: bool = False
    first_token: str = ""
    rows: Sequence[LogprobRow] = ()


async def echo_of(client: EngineClient, prompt: Prompt, alone: bool) -> Echo:
    """Raises as EngineClient.submit does, and InvalidRequestError where there is no tokenizer."""
    if isinstance(prompt, TextPrompt):
        return Echo(prompt.text, alone)
    assert isinstance(prompt, TokensPrompt)
    try:
        return Echo(await client.detokenize(prompt.token_ids), alone)
    except InvalidRequestError as error:
        raise InvalidRequestError(f"echo of token ids: {error}", param="echo") from None


async def add_logprobs(
    echo: Echo, client: EngineClient, handle: RequestHandle, rows: Sequence[LogprobRow]
) -> None:
    """rows: of the prompt's second token and those after it."""
    first = handle.prompt_token_ids[:4]
    if handle.request.output.tokens_as_ids:
        echo.first_token = token_id_name(int(codec.ints(first)[0])).decode()
    else:
        echo.first_token = await client.detokenize(first)
    echo.rows = rows


def echoed_logprobs(echo: Echo, rows: Sequence[LogprobRow]) -> dict[str, Any]:
    """The `logprobs` object of a completion whose text begins with the prompt's."""
    first = echo.first_token
    place = len(first) if echo.text.startswith(first) else 0
    of_prompt = completion_logprobs(echo.rows, place)
    of_output = completion_logprobs([] if echo.alone else rows, len(echo.text))
    begin: dict[str, list[Any]] = {
        "tokens": [first],
        "token_logprobs": [None],
        "top_logprobs": [None],
        "text_offset": [0],
    }
    return {name: value + of_prompt[name] + of_output[name] for name, value in begin.items()}
