"""How a batch is run: so many at a time, each written as it comes, failures where they belong."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ringcast.frontend.batch.input_file import InputLine
from ringcast.frontend.batch.lines import BatchRequest, BatchResponse, Outcome
from ringcast.frontend.batch.output_file import OutputFile
from ringcast.frontend.batch.run import Tally, run_batch
from ringcast.mq.errors import EngineDeadError, OverloadedError, RingcastError

BODY = b'{"usage":{"prompt_tokens":3,"completion_tokens":2}}'


def lines(*names: str) -> Iterator[InputLine]:
    for number, name in enumerate(names, 1):
        line = {"custom_id": name, "method": "POST", "url": "/v1/completions", "body": {}}
        yield InputLine(number, json.dumps(line).encode(), False)


class Answerer:
    """Answers when it is let. `asked` is in the order of asking."""

    def __init__(self, *errors: Exception) -> None:
        self.asked: list[str] = []
        self.aborted: list[str] = []
        self.body = BODY
        self.status = 200
        self.errors = list(errors)
        self._open: dict[str, asyncio.Event] = {}
        self._let_all = False

    @property
    def num_open(self) -> int:
        return len(self._open)

    def let(self, name: str) -> None:
        self._open[name].set()

    def let_all(self) -> None:
        self._let_all = True
        for event in self._open.values():
            event.set()

    async def answer(self, request: BatchRequest) -> BatchResponse:
        name = request.custom_id
        self.asked.append(name)
        if self.errors:
            raise self.errors.pop(0)
        event = self._open[name] = asyncio.Event()
        try:
            if not self._let_all:
                await event.wait()
        except asyncio.CancelledError:
            self.aborted.append(name)
            raise
        finally:
            del self._open[name]
        return BatchResponse(self.status, "r", msgspec.Raw(self.body))

    async def __aenter__(self) -> Answerer:
        return self

    async def __aexit__(self, *_: Any) -> None:
        pass


class Batch:
    """A run, and what it has written."""

    def __init__(self, path: Path, answerer: Answerer) -> None:
        self.path = path
        self.answerer = answerer
        self.tally = Tally()
        self.num_reports = 0

    async def run(self, source: Iterator[InputLine], limit: int) -> None:
        def report() -> None:
            self.num_reports += 1

        with OutputFile(str(self.path), False) as output:
            await run_batch(source, self.answerer, output, limit, self.tally, report)

    @property
    def written(self) -> list[str]:
        return [json.loads(line)["custom_id"] for line in self.path.read_bytes().splitlines()]


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., Batch]:
    return lambda *errors: Batch(tmp_path / "out.jsonl", Answerer(*errors))


async def test_so_many_at_a_time_and_written_as_they_come(make: Any, until: Any) -> None:
    batch = make()
    answerer = batch.answerer
    num_read = 0

    def source() -> Iterator[InputLine]:
        nonlocal num_read
        for line in lines(*"abcdef"):
            num_read += 1
            yield line

    running = asyncio.create_task(batch.run(source(), 2))
    await until(lambda: answerer.asked == ["a", "b"])
    answerer.let("b")
    await until(lambda: answerer.asked == ["a", "b", "c"])
    assert batch.written == ["b"]
    assert num_read == 3
    answerer.let("c")
    await until(lambda: answerer.asked == ["a", "b", "c", "d"])
    assert batch.written == ["b", "c"]
    answerer.let_all()
    await running
    assert sorted(batch.written) == list("abcdef")
    assert batch.tally == Tally(answered=6, prompt_tokens=18, output_tokens=12)
    assert batch.num_reports == 6


async def test_lines_at_fault_are_written_and_the_rest_goes_on(make: Any) -> None:
    batch = make()
    batch.answerer.let_all()
    a, b = lines("a", "b")
    bad = InputLine(3, b"no JSON", False)
    await batch.run(iter([a, bad, a._replace(number=4, duplicate=True), b]), 1)
    assert batch.written == ["a", None, None, "b"]
    assert (batch.tally.answered, batch.tally.failed) == (2, 2)


@pytest.mark.parametrize("body", [b'{"error":{}}', b"[]", b'{"usage":{"prompt_tokens":9}}'])
async def test_failed_answers_count_as_such(make: Any, body: bytes) -> None:
    batch = make()
    batch.answerer.let_all()
    batch.answerer.status, batch.answerer.body = 400, body
    await batch.run(lines("a"), 3)
    assert batch.tally == Tally(failed=1)
    assert not batch.tally.any_answered
    assert json.loads(batch.path.read_bytes())["response"]["body"] == json.loads(body)


@pytest.mark.parametrize(
    ("usage", "counts"),
    [
        (b'{"prompt_tokens":3,"total_tokens":3}', (3, 0)),  # of embeddings
        (b'{"input_tokens":3,"output_tokens":2,"total_tokens":5}', (3, 2)),  # of responses
    ],
)
async def test_usage_by_other_names(make: Any, usage: bytes, counts: tuple[int, int]) -> None:
    batch = make()
    batch.answerer.let_all()
    batch.answerer.body = b'{"usage":' + usage + b"}"
    await batch.run(lines("a"), 1)
    assert (batch.tally.prompt_tokens, batch.tally.output_tokens) == counts


async def test_an_answer_without_usage(make: Any) -> None:
    batch = make()
    batch.answerer.let_all()
    batch.answerer.body = b"[]"
    await batch.run(lines("a"), 1)
    assert batch.tally == Tally(answered=1)


async def test_who_is_overloaded_is_asked_again(make: Any) -> None:
    batch = make(OverloadedError("full", 0.001), OverloadedError("full", 0.001))
    batch.answerer.let_all()
    await batch.run(lines("a", "b"), 1)
    assert batch.answerer.asked == ["a", "a", "a", "b"]
    assert batch.tally.answered == 2


async def test_a_death_ends_it_and_what_was_under_way_is_not_written(make: Any, until: Any) -> None:
    batch = make()
    running = asyncio.create_task(batch.run(lines("a", "b", "c", "d"), 2))
    await until(lambda: batch.answerer.num_open == 2)
    batch.answerer.errors.append(EngineDeadError("worker.0 died"))
    batch.answerer.let("a")
    with pytest.raises(EngineDeadError, match=r"worker.0 died"):
        await running
    assert batch.answerer.asked == ["a", "b", "c"]
    assert batch.answerer.aborted == ["b"]
    assert batch.written == ["a"]
    assert batch.tally == Tally(answered=1, prompt_tokens=3, output_tokens=2)


async def test_cancelling_keeps_what_is_finished(make: Any, until: Any) -> None:
    batch = make()
    running = asyncio.create_task(batch.run(lines(*"abcd"), 3))
    await until(lambda: batch.answerer.num_open == 3)
    batch.answerer.let("b")
    await until(lambda: batch.answerer.asked == list("abcd"))
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert batch.written == ["b"]
    assert sorted(batch.answerer.aborted) == ["a", "c", "d"]
    assert batch.tally.answered == 1


async def test_no_room_to_write(make: Any) -> None:
    batch = make()
    batch.path = Path("/dev/full")
    batch.answerer.let_all()
    with pytest.raises(RingcastError, match="No space left"):
        await batch.run(lines("a", "b", "c"), 2)
    assert batch.tally.answered == 0


def test_earlier_outcomes() -> None:
    tally = Tally()
    tally.add_earlier(Outcome("a", 400, 0))
    tally.add_earlier(Outcome(None, 0, 3))
    assert not tally.any_answered
    tally.add_earlier(Outcome("b", 200, 0))
    assert (tally.earlier, tally.earlier_failed, tally.any_answered) == (3, 2, True)
