"""What was asked of the tokenizer, beside the requests of the ledger, and has not been answered.

A question has no state in the engine: if its tokenizer dies, another one is asked, as soon as there
is one. One that was with a tokenizer at two deaths in a row is taken for their cause.
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
from .text_routing import TextActors

MAX_STRIKES = 2


class _Question(msgspec.Struct):
    message: Tokenize | Detokenize
    answer: asyncio.Future[Any]
    is_sent: bool = False
    strikes: int = 0


class TokenizerQuestions:
    """send: to the message's tokenizer. tokenizers: of them one that lives is chosen. index,
    prefix: the client's number, and what begins its names."""

    def __init__(
        self,
        send: Callable[[Tokenize | Detokenize], None],
        tokenizers: TextActors,
        index: int,
        prefix: str,
    ) -> None:
        self._send_to = send
        self._tokenizers = tokenizers
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
        """A tokenizer has died, or several."""
        for name, question in self._open.items():
            if not question.is_sent or self._tokenizers.is_live(question.message.tokenizer):
                continue
            question.strikes += 1
            self._take_back(question)
            if question.strikes >= MAX_STRIKES:
                _fail(
                    question,
                    PoisonousRequestError(
                        f"{name} was with a tokenizer when it died, twice in a row: {error}"
                    ),
                )

    def send_again(self) -> None:
        """Those that are with no tokenizer that lives."""
        for question in self._open.values():
            if not question.is_sent and not question.answer.done():
                self._send(question)

    def fail(self, error: EngineDeadError) -> None:
        for question in self._open.values():
            _fail(question, copy.copy(error))

    def _name(self) -> str:
        self._num_asked += 1
        return f"{self._prefix}-tokenizer-{self._num_asked}"

    async def _ask(self, message: Tokenize | Detokenize, is_up: bool) -> Any:
        question = _Question(message, asyncio.get_running_loop().create_future())
        self._open[message.request_id] = question
        try:
            if is_up:
                self._send(question)
            return await question.answer
        finally:
            del self._open[message.request_id]
            self._take_back(question)

    def _send(self, question: _Question) -> None:
        tokenizer = self._tokenizers.choose()
        question.message = msgspec.structs.replace(question.message, tokenizer=tokenizer)
        question.is_sent = True
        self._tokenizers.count(tokenizer, 1)
        self._send_to(question.message)

    def _take_back(self, question: _Question) -> None:
        if question.is_sent:
            question.is_sent = False
            self._tokenizers.count(question.message.tokenizer, -1)


def _fail(question: _Question, error: RingcastError) -> None:
    if not question.answer.done():
        question.answer.set_exception(error)
