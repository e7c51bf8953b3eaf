"""What was asked of the tokenizer, beside the requests of the ledger, and has not been answered.

A question has no state in the engine, so whatever dies while it is open, it is asked again when all
is up. One that was open at two deaths of the tokenizer in a row is taken for their cause.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable
from typing import Any

import msgspec

from ..mq.errors import EngineDeadError, PoisonousRequestError, RingcastError
from ..mq.messages import Detokenize, Detokenized, Prompt, Rejected, Tokenize, Tokenized
from .handle import error_of

MAX_STRIKES = 2


class _Question(msgspec.Struct):
    message: Tokenize | Detokenize
    answer: asyncio.Future[Any]
    is_sent: bool
    strikes: int = 0


class TokenizerQuestions:
    """send: to the tokenizer. index, prefix: the client's number, and what begins its names."""

    def __init__(
        self, send: Callable[[Tokenize | Detokenize], None], index: int, prefix: str
    ) -> None:
        self._send = send
        self._index = index
        self._prefix = prefix
        self._num_asked = 0
        self._open: dict[str, _Question] = {}

    @property
    def num_open(self) -> int:
        return len(self._open)

    async def tokenize(self, prompt: Prompt, with_texts: bool, is_up: bool) -> Tokenized:
        """Sent now if the engine is up, else by `send_again`. Raises InvalidRequestError."""
        question = Tokenize(self._index, self._name(), prompt, with_texts)
        answer: Tokenized = await self._ask(question, is_up)
        return answer

    async def detokenize(self, token_ids: bytes, is_up: bool) -> str:
        """Likewise."""
        answer: Detokenized = await self._ask(
            Detokenize(self._index, self._name(), token_ids), is_up
        )
        return answer.text

    def answered(self, message: Tokenized | Detokenized | Rejected) -> bool:
        """Whether this was an answer to a question that is open."""
        question = self._open.get(message.request_id)
        if question is None or question.answer.done():
            return False
        if isinstance(message, Rejected):
            question.answer.set_exception(error_of(message.error))
        else:
            question.answer.set_result(message)
        return True

    def blame(self, error: str) -> None:
        """The tokenizer has died."""
        for name, question in self._open.items():
            question.strikes += question.is_sent
            question.is_sent = False
            if question.strikes >= MAX_STRIKES:
                _fail(
                    question,
                    PoisonousRequestError(
                        f"{name} was with the tokenizer when it died, twice in a row: {error}"
                    ),
                )

    def send_again(self) -> None:
        for question in self._open.values():
            if not question.answer.done():
                question.is_sent = True
                self._send(question.message)

    def fail(self, error: EngineDeadError) -> None:
        for question in self._open.values():
            _fail(question, copy.copy(error))

    def _name(self) -> str:
        self._num_asked += 1
        return f"{self._prefix}-tokenizer-{self._num_asked}"

    async def _ask(self, message: Tokenize | Detokenize, is_up: bool) -> Any:
        question = _Question(message, asyncio.get_running_loop().create_future(), is_up)
        self._open[message.request_id] = question
        try:
            if is_up:
                self._send(message)
            return await question.answer
        finally:
            del self._open[message.request_id]


def _fail(question: _Question, error: RingcastError) -> None:
    if not question.answer.done():
        question.answer.set_exception(error)
