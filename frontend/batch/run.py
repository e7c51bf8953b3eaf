"""Runs a batch: so many requests at a time, each answer written as it comes."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Iterator

import msgspec

from ...mq.errors import OverloadedError
from .answerer import Answerer
from .input_file import InputLine
from .lines import (
    BatchRequest,
    BatchResponse,
    LineError,
    Outcome,
    error_line,
    read_line,
    response_line,
)
from .output_file import OutputFile


@dataclasses.dataclass
class Tally:
    """What has come of a batch's lines. earlier: in runs before this one. Tokens: in this one."""

    answered: int = 0
    failed: int = 0
    earlier: int = 0
    earlier_failed: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0

    def add_earlier(self, outcome: Outcome) -> None:
        self.earlier += 1
        self.earlier_failed += outcome.status_code != 200

    def add_response(self, response: BatchResponse) -> None:
        if response.status_code != 200:
            self.failed += 1
            return
        self.answered += 1
        usage = _usage_of(response.body)
        self.prompt_tokens += usage.prompt_tokens + usage.input_tokens
        self.output_tokens += usage.completion_tokens + usage.output_tokens

    @property
    def any_answered(self) -> bool:
        return self.answered > 0 or self.earlier > self.earlier_failed


async def run_batch(
    lines: Iterator[InputLine],
    answerer: Answerer,
    output: OutputFile,
    limit: int,
    tally: Tally,
    on_progress: Callable[[], None],
) -> None:
    """Answer all lines into `output`, `limit` of them at a time. on_progress: after each.

    Raises EngineDeadError when nothing can be answered any more, and RingcastError when nothing
    can be written. What was under way then, or when this is cancelled, is aborted and not written.
    """

    async def work() -> None:
        for line in lines:
            await asyncio.sleep(0)  # lines at fault need no wait, and others want the loop too
            try:
                request = read_line(line.text, line.number, line.duplicate)
            except LineError as error:
                output.write(error_line(error, line.number))
                tally.failed += 1
            else:
                response = await _answer(request, answerer)
                output.write(response_line(request.custom_id, response))
                tally.add_response(response)
            on_progress()

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(limit):
                group.create_task(work())
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None


async def _answer(request: BatchRequest, answerer: Answerer) -> BatchResponse:
    while True:
        try:
            return await answerer.answer(request)
        except OverloadedError as error:
            await asyncio.sleep(error.retry_after)


class _Usage(msgspec.Struct):
    """By the names of completions and embeddings, and by those of /v1/responses."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    input_tokens: int = 0
    output_tokens: int = 0


class _UsageField(msgspec.Struct):
    usage: _Usage


_read_usage = msgspec.json.Decoder(_UsageField).decode


def _usage_of(body: msgspec.Raw) -> _Usage:
    try:
        return _read_usage(body).usage
    except msgspec.ValidationError:  # of a server that doesn't say
        return _Usage()
