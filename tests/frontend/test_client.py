"""The ledger: every request has one end, whatever arrives, twice or late."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from no_model import SPEC

from ringcast.frontend.client import EngineClient
from ringcast.frontend.mailbox import Mailbox
from ringcast.mq import codec
from ringcast.mq.config import ModelSpec
from ringcast.mq.errors import (
    EngineDeadError,
    InvalidRequestError,
    OverloadedError,
    RequestFailedError,
)
from ringcast.mq.messages import (
    Abort,
    Chunk,
    Chunks,
    ErrorInfo,
    Finish,
    Generate,
    OutputSpec,
    Rejected,
    TextPrompt,
)
from ringcast.mq.sampling_params import SamplingParams

PROMPT = TextPrompt("hi")


class Recorder:
    """A client and what it sent."""

    def __init__(self, spec: ModelSpec, **options: Any) -> None:
        self.sent: list[Any] = []
        self.client = EngineClient(spec, lambda to, message: self.sent.append(message), **options)

    def chunks(self, *chunks: Chunk) -> None:
        self.client.deliver("detokenizer.0", Chunks(list(chunks)))


@pytest.fixture
def recorder(spec: ModelSpec) -> Recorder:
    return Recorder(spec)


def chunk(
    handle: Any, first: int, ids: list[int], finish: str | None = None, **fields: Any
) -> Chunk:
    end = None if finish is None else Finish(finish, 3, first + len(ids), **fields)  # type: ignore[arg-type]
    return Chunk(handle.request_id, 0, 0, first, codec.pack(ids), text=str(ids), finish=end)


async def test_a_request_goes_to_the_tokenizer_with_a_drawn_seed(recorder: Recorder) -> None:
    handle = recorder.client.submit(PROMPT, SamplingParams(), cache_salt="salt")
    (sent,) = recorder.sent
    assert isinstance(sent, Generate)
    assert sent == handle.request
    assert sent.params.seed is not None
    assert (sent.incarnation, sent.prompt, sent.cache_salt) == (0, PROMPT, "salt")
    other = recorder.client.submit(PROMPT, SamplingParams())
    assert other.request_id != handle.request_id
    assert other.request.params.seed != sent.params.seed


async def test_a_given_seed_is_kept(recorder: Recorder) -> None:
    handle = recorder.client.submit(PROMPT, SamplingParams(seed=5))
    assert handle.request.params.seed == 5


async def test_an_engine_with_a_seed_draws_the_same_seeds_in_each_run(spec: ModelSpec) -> None:
    def drawn(seed: int | None) -> list[int | None]:
        client = Recorder(spec, seed=seed).client
        return [client.submit(PROMPT, SamplingParams()).request.params.seed for _ in range(3)]

    assert drawn(7) == drawn(7)
    assert len({*drawn(7), *drawn(8), *drawn(None), *drawn(None)}) == 12


async def test_the_answer_comes_back_to_the_client_that_asked(spec: ModelSpec) -> None:
    recorder = Recorder(spec, index=3)
    assert recorder.client.submit(PROMPT, SamplingParams()).request.output.client == 3
    output = OutputSpec(client=0, form="chat")
    handle = recorder.client.submit(PROMPT, SamplingParams(), output)
    assert handle.request.output == OutputSpec(client=3, form="chat")


async def test_chunks_arrive_in_order_and_end_with_the_finish(recorder: Recorder) -> None:
    handle = recorder.client.submit(PROMPT, SamplingParams())
    assert recorder.client.num_open == 1
    recorder.chunks(chunk(handle, 0, [5]), chunk(handle, 1, [6, 7]))
    recorder.chunks(chunk(handle, 3, [], "stop"))
    assert [c.first_index async for c in handle] == [0, 1, 3]
    assert codec.ints(handle.emitted[0]).tolist() == [5, 6, 7]
    assert handle.finishes[0] is not None
    assert recorder.client.num_open == 0


async def test_every_choice_must_finish(recorder: Recorder) -> None:
    handle = recorder.client.submit(PROMPT, SamplingParams(n=2))
    end = Finish("length", 3, 1)
    for choice in (1, 0):
        assert recorder.client.num_open == 1
        recorder.chunks(Chunk(handle.request_id, 0, choice, 0, codec.pack([choice]), finish=end))
    assert [c.choice async for c in handle] == [1, 0]
    assert recorder.client.num_open == 0


async def test_duplicates_and_other_incarnations_are_dropped(recorder: Recorder) -> None:
    handle = recorder.client.submit(PROMPT, SamplingParams())
    first, second, last = (
        chunk(handle, 0, [5]),
        chunk(handle, 1, [6]),
        chunk(handle, 2, [7], "stop"),
    )
    old = Chunk(handle.request_id, 7, 0, 1, codec.pack([9]), text="old")
    stranger = Chunk("nobody", 0, 0, 0, codec.pack([9]))
    recorder.chunks(first, second, first, old, second, stranger, last, last)
    assert [c async for c in handle] == [first, second, last]
    assert recorder.client.statistics()["dropped"] == 5


async def test_a_gap_is_a_broken_invariant(recorder: Recorder) -> None:
    handle = recorder.client.submit(PROMPT, SamplingParams())
    with pytest.raises(AssertionError, match="tokens before 2 are missing"):
        recorder.chunks(chunk(handle, 2, [5]))


async def test_a_rejection_raises_with_everything_the_engine_said(recorder: Recorder) -> None:
    handle = recorder.client.submit(PROMPT, SamplingParams(n=3))
    error = ErrorInfo("too long: 9 > 8", 422, param="prompt", code="context_length_exceeded")
    recorder.client.deliver("tokenizer.0", Rejected(handle.request_id, 1, error))
    assert recorder.client.num_open == 1
    recorder.client.deliver("tokenizer.0", Rejected(handle.request_id, 0, error))
    with pytest.raises(InvalidRequestError, match="9 > 8") as caught:
        await anext(handle)
    assert caught.value.param == "prompt"
    assert caught.value.status == 422
    assert vars(caught.value)["code"] == "context_length_exceeded"
    assert recorder.client.num_open == 0
    recorder.client.deliver("tokenizer.0", Rejected(handle.request_id, 0, error))
    assert recorder.client.statistics()["dropped"] == 2


@pytest.mark.parametrize(
    ("info", "kind"),
    [
        (ErrorInfo("boom", 500), RequestFailedError),
        (ErrorInfo("later", 503), OverloadedError),
        (ErrorInfo("bad grammar", 400), InvalidRequestError),
        (None, RequestFailedError),
    ],
)
async def test_a_failed_choice_raises_after_what_came_before(
    recorder: Recorder, info: ErrorInfo | None, kind: type[Exception]
) -> None:
    handle = recorder.client.submit(PROMPT, SamplingParams())
    recorder.chunks(chunk(handle, 0, [5]), chunk(handle, 1, [], "error", error=info))
    assert (await anext(handle)).first_index == 0
    with pytest.raises(kind, match=info.message if info else "failed inside the engine"):
        await anext(handle)
    assert recorder.client.num_open == 0


async def test_a_failed_choice_takes_its_siblings_along(recorder: Recorder) -> None:
    handle = recorder.client.submit(PROMPT, SamplingParams(n=2))
    recorder.chunks(chunk(handle, 0, [], "error"))
    with pytest.raises(RequestFailedError):
        await anext(handle)
    assert recorder.sent[1:] == [Abort(handle.request_id, 0)]
    assert recorder.client.num_open == 1
    abort = Finish("abort", 3, 0)
    recorder.chunks(Chunk(handle.request_id, 0, 1, 0, b"", finish=abort))
    assert recorder.client.num_open == 0
    with pytest.raises(RequestFailedError):
        await anext(handle)


async def test_an_abort_waits_for_its_acknowledgement(recorder: Recorder) -> None:
    handle = recorder.client.submit(PROMPT, SamplingParams())
    handle.abort()
    handle.abort()
    assert recorder.sent[1:] == [Abort(handle.request_id, 0)]
    assert recorder.client.num_open == 1
    recorder.chunks(chunk(handle, 0, [5]), chunk(handle, 1, [], "abort"))
    assert recorder.client.num_open == 0
    assert [c.finish and c.finish.reason async for c in handle] == [None, "abort"]
    handle.abort()
    assert len(recorder.sent) == 2


async def test_leaving_the_with_block_aborts_and_keeps_the_tombstone(recorder: Recorder) -> None:
    with recorder.client.submit(PROMPT, SamplingParams()) as handle:
        recorder.chunks(chunk(handle, 0, [5]))
    assert recorder.sent[1:] == [Abort(handle.request_id, 0)]
    assert recorder.client.num_open == 1
    recorder.chunks(chunk(handle, 1, [6], "stop"))
    assert recorder.client.num_open == 0
    with recorder.client.submit(PROMPT, SamplingParams()) as finished:
        recorder.chunks(chunk(finished, 0, [5], "stop"))
    assert len(recorder.sent) == 3


async def test_death_gives_every_open_request_one_terminal(recorder: Recorder) -> None:
    handles = [recorder.client.submit(PROMPT, SamplingParams()) for _ in range(3)]
    recorder.chunks(chunk(handles[0], 0, [5], "stop"), chunk(handles[1], 0, [5]))
    waiting = asyncio.create_task(anext(handles[2]))
    await asyncio.sleep(0)
    recorder.client.fail_all(EngineDeadError("worker.0 died", "Traceback: boom"))
    with pytest.raises(EngineDeadError, match=r"worker\.0 died\nTraceback: boom"):
        await waiting
    assert len([c async for c in handles[0]]) == 1
    await anext(handles[1])
    with pytest.raises(EngineDeadError, match="boom"):
        await anext(handles[1])
    with pytest.raises(EngineDeadError, match="boom") as caught:
        recorder.client.submit(PROMPT, SamplingParams())
    assert caught.value is not recorder.client.dead
    assert recorder.client.num_open == 0
    recorder.chunks(chunk(handles[1], 1, [6], "stop"))


async def test_overload_and_drain_refuse_new_requests(spec: ModelSpec) -> None:
    recorder = Recorder(spec, max_num_queued_reqs=2)
    client = recorder.client
    handles = [client.submit(PROMPT, SamplingParams()) for _ in range(2)]
    assert client.room == 0
    with pytest.raises(OverloadedError, match="2 requests are running or waiting"):
        client.submit(PROMPT, SamplingParams())
    recorder.chunks(chunk(handles[0], 0, [1], "stop"))
    assert client.room == 1
    client.draining = True
    with pytest.raises(OverloadedError, match="shutting down"):
        client.submit(PROMPT, SamplingParams())
    idle = asyncio.create_task(client.wait_idle())
    await asyncio.sleep(0)
    handles[1].abort()
    await asyncio.sleep(0)
    assert not idle.done()
    recorder.chunks(chunk(handles[1], 0, [], "abort"))
    await idle
    await client.wait_idle()


async def test_a_shared_mailbox_ends_with_the_last_of_its_requests(recorder: Recorder) -> None:
    mailbox = Mailbox()
    a, b = (recorder.client.submit(PROMPT, SamplingParams(), mailbox=mailbox) for _ in range(2))
    taking = asyncio.create_task(mailbox.take())
    await asyncio.sleep(0)
    recorder.chunks(chunk(b, 0, [5], "stop"), chunk(a, 0, [6]))
    assert [c.request_id for c in await taking] == [b.request_id, a.request_id]
    recorder.chunks(chunk(a, 1, [], "stop"))
    assert len(await mailbox.take()) == 1
    assert await mailbox.take() == []


async def test_a_cancelled_wait_loses_nothing(recorder: Recorder) -> None:
    handle = recorder.client.submit(PROMPT, SamplingParams())
    waiting = asyncio.create_task(anext(handle))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    recorder.chunks(chunk(handle, 0, [5], "stop"))
    assert (await anext(handle)).first_index == 0


@given(data=st.data())
def test_whatever_is_sent_again_each_token_arrives_once(data: st.DataObject) -> None:
    """Readers of a channel may get again what they got before, from any place on, in order."""
    n = data.draw(st.integers(1, 3))
    lengths = data.draw(st.lists(st.lists(st.integers(0, 3), max_size=4), min_size=n, max_size=n))

    async def run() -> None:
        recorder = Recorder(SPEC)
        handle = recorder.client.submit(PROMPT, SamplingParams(n=n))
        streams = [chunks_of(handle, choice, sizes) for choice, sizes in enumerate(lengths)]
        order = data.draw(st.permutations([i for i, s in enumerate(streams) for _ in s]))
        stream = [streams[i].pop(0) for i in order]
        sent = 0
        while sent < len(stream):
            back = data.draw(st.integers(0, sent))
            upto = data.draw(st.integers(sent + 1, len(stream)))
            recorder.chunks(*stream[sent - back : upto])
            sent = upto
        assert [c async for c in handle] == stream
        assert [codec.ints(e).tolist() for e in handle.emitted] == [
            list(range(sum(sizes))) for sizes in lengths
        ]
        assert recorder.client.num_open == 0

    asyncio.run(run())


def chunks_of(handle: Any, choice: int, sizes: list[int]) -> list[Chunk]:
    """A choice's chunks of so many tokens each (none are empty), and its end."""
    chunks, first = [], 0
    for size in filter(None, sizes):
        ids = codec.pack(range(first, first + size))
        chunks.append(Chunk(handle.request_id, 0, choice, first, ids))
        first += size
    return [
        *chunks,
        Chunk(handle.request_id, 0, choice, first, b"", finish=Finish("stop", 3, first)),
    ]


async def test_a_thousand_interleaved_requests(client: EngineClient, engine: Any) -> None:
    client.max_num_queued_reqs = 1000

    async def one() -> str:
        handle = client.submit(PROMPT, SamplingParams(), OutputSpec(client=0, delta=True))
        return "".join([c.text async for c in handle])

    texts = await asyncio.gather(*(one() for _ in range(1000)))
    assert set(texts) == {"".join(engine.words)}
    assert client.num_open == 0


async def test_what_cannot_be_sent_takes_no_place(spec: ModelSpec) -> None:
    def refuse(to: str, message: Any) -> None:
        raise UnicodeEncodeError("utf-8", "x", 0, 1, "lone surrogate")

    client = EngineClient(spec, refuse, max_num_queued_reqs=3)
    with pytest.raises(UnicodeEncodeError):
        client.submit(PROMPT, SamplingParams())
    with pytest.raises(UnicodeEncodeError):
        await client.tokenize(PROMPT)
    await client.wait_idle()
    assert client.room == 3
    assert client.num_open_of_all == 0
