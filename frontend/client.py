"""The ledger of a client's requests: what was asked and emitted, and who waits. No transport.

1. A request is open from `submit` until every one of its choices has had its one terminal: a
   Finish, the request's Rejected, or the death of the engine (`fail_all`).
2. Aborting ends nothing by itself. It asks the engine, and the entry stays as a tombstone until the
   engine has answered, so that a late chunk is known for what it is. The caller need not wait.
3. A choice's tokens are counted. A chunk whose tokens have been seen, one of another incarnation,
   and one of a request that isn't open are dropped; one that leaves a gap is a broken invariant.

    state      submit   chunk           last Finish   Rejected        abort      engine died
    open       -        to the caller   closed        closed, raises  aborting   closed, raises
    aborting   -        to the caller   closed        closed, raises  -          closed, raises
    closed     -        dropped         dropped       dropped         -          -

What arrives for a caller waits in a Mailbox, which several requests can share (a batch of prompts
has one reader).
"""

from __future__ import annotations

import asyncio
import copy
import random
import time
import uuid
from collections.abc import Callable
from types import TracebackType

import msgspec

from ..mq.config import ModelSpec
from ..mq.errors import (
    EngineDeadError,
    InvalidRequestError,
    OverloadedError,
    RequestFailedError,
    RingcastError,
)
from ..mq.messages import (
    Abort,
    Accepted,
    Chunk,
    Chunks,
    ErrorInfo,
    Finish,
    Generate,
    Message,
    OutputSpec,
    Prompt,
    Rejected,
)
from ..mq.sampling_params import SamplingParams

TOKENIZER = "tokenizer.0"
_TOKEN_BYTES = 4


class Mailbox:
    """Chunks that have arrived for one waiting task. Ends when each of its requests has."""

    __slots__ = ("_error", "_items", "_waiter", "num_open")

    def __init__(self) -> None:
        self.num_open = 0
        self._items: list[Chunk] = []
        self._error: RingcastError | None = None
        self._waiter: asyncio.Future[None] | None = None

    async def take(self) -> list[Chunk]:
        """All chunks that wait, or the next one; nothing at the end.

        Raises the first error of any of its requests, once what came before it has been taken.
        """
        while not self._items:
            if self._error is not None:
                raise self._error
            if not self.num_open:
                return []
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        items = self._items
        self._items = []
        return items

    def put(self, chunk: Chunk) -> None:
        self._items.append(chunk)
        self._wake()

    def close_one(self, error: RingcastError | None = None) -> None:
        self.num_open -= 1
        if error is not None and self._error is None:
            self._error = error
        self._wake()

    def _wake(self) -> None:
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)


class RequestHandle:
    """A request in the ledger. Iterate over it for its chunks; leaving its `with` block aborts it.

    request: what was sent to the engine, the drawn seed included.
    emitted: by choice, the token ids handed to the caller so far (i32 bytes).
    finishes: by choice, its terminal, once it has come.
    prompt_token_ids: the prompt as the tokenizer encoded it (i32 bytes), once it has.
    mailbox: where its chunks arrive.
    """

    __slots__ = (
        "_client",
        "_discard",
        "_left",
        "_num_unfinished",
        "_waiting",
        "aborting",
        "emitted",
        "finishes",
        "mailbox",
        "prompt_token_ids",
        "request",
    )

    def __init__(self, client: EngineClient, request: Generate, mailbox: Mailbox) -> None:
        n = request.params.n
        self.request = request
        self.mailbox = mailbox
        self.emitted = [bytearray() for _ in range(n)]
        self.finishes: list[Finish | None] = [None] * n
        self.aborting = False
        self.prompt_token_ids = b""
        self._num_unfinished = n
        self._client = client
        self._discard = False
        self._left = False
        self._waiting: list[Chunk] = []
        mailbox.num_open += 1

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def open(self) -> bool:
        return self._num_unfinished > 0

    def abort(self) -> None:
        """Ask the engine to end this request: each choice still open gets a Finish("abort")."""
        self._client.abort(self)

    def discard(self) -> None:
        """Abort, and drop what still arrives."""
        self._discard = True
        self.abort()

    def __aiter__(self) -> RequestHandle:
        return self

    async def __anext__(self) -> Chunk:
        if not self._waiting:
            self._waiting = await self.mailbox.take()
            self._waiting.reverse()
        if not self._waiting:
            raise StopAsyncIteration
        return self._waiting.pop()

    def __enter__(self) -> RequestHandle:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.discard()

    def accept(self, chunk: Chunk) -> bool:
        """Take a chunk into the ledger and hand it on; False if it is a duplicate."""
        choice = chunk.choice
        emitted = self.emitted[choice]
        place = chunk.first_index * _TOKEN_BYTES
        if self.finishes[choice] is not None or place < len(emitted):
            return False
        assert place == len(emitted), (
            f"{self.request_id}: tokens before {chunk.first_index} are missing"
        )
        emitted += chunk.token_ids
        finish = chunk.finish
        if finish is None:
            if not self._discard:
                self.mailbox.put(chunk)
            return True
        self.finishes[choice] = finish
        self._num_unfinished -= 1
        if finish.reason == "error":
            # One choice has failed, so the request has: the others are not needed any more.
            self._leave(error_of(finish.error))
            self.discard()
        elif not self._discard:
            self.mailbox.put(chunk)
        if not self._num_unfinished:
            self._leave()
        return True

    def fail(self, error: RingcastError) -> None:
        self._num_unfinished = 0
        self._leave(error)

    def _leave(self, error: RingcastError | None = None) -> None:
        if not self._left:
            self._left = True
            self.mailbox.close_one(error)


class EngineClient:
    """Hands requests to an engine and takes its answers. All of it runs on one event loop.

    send: `send(to, message)` to an actor of the engine; must not block.
    index: which client this is ("client.0"), so that the detokenizer knows where to answer.
    seed: of the seeds that are drawn for requests without one; None draws others in each run.
    draining: set it, and new requests are refused. dead: what `fail_all` was told.
    """

    def __init__(
        self,
        spec: ModelSpec,
        send: Callable[[str, Message], None],
        index: int = 0,
        max_num_queued_reqs: int = 2048,
        seed: int | None = None,
    ) -> None:
        self.spec = spec
        self.index = index
        self.max_num_queued_reqs = max_num_queued_reqs
        self.draining = False
        self.dead: EngineDeadError | None = None
        self._send = send
        self._ledger: dict[str, RequestHandle] = {}
        self._prefix = uuid.uuid4().hex[:8]
        self._random = random.Random(uuid.uuid4().int if seed is None else seed)
        self._idle: list[asyncio.Future[None]] = []
        self._num_submitted = 0
        self._num_dropped = 0

    @property
    def num_open(self) -> int:
        """Requests that the engine holds: running, waiting, or aborted and not yet acknowledged."""
        return len(self._ledger)

    @property
    def room(self) -> int:
        """How many more requests `submit` would take now."""
        return max(0, self.max_num_queued_reqs - len(self._ledger))

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams,
        output: OutputSpec | None = None,
        *,
        cache_salt: str = "",
        mailbox: Mailbox | None = None,
    ) -> RequestHandle:
        """Send a request to the engine. Without `output`, each choice is one raw chunk at its end.

        Raises OverloadedError when the engine is full or drains, and EngineDeadError.
        """
        self._refuse_if_unable()
        if params.seed is None:
            params = msgspec.structs.replace(params, seed=self._random.getrandbits(63))
        self._num_submitted += 1
        request = Generate(
            request_id=f"{self._prefix}-{self._num_submitted}",
            incarnation=0,
            prompt=prompt,
            params=params,
            output=_addressed(output, self.index),
            arrival=time.monotonic(),
            cache_salt=cache_salt,
        )
        self._send(TOKENIZER, request)
        handle = RequestHandle(self, request, mailbox or Mailbox())
        self._ledger[request.request_id] = handle
        return handle

    def abort(self, handle: RequestHandle) -> None:
        if handle.open and not handle.aborting:
            handle.aborting = True
            self._send(TOKENIZER, Abort(handle.request_id, handle.request.incarnation))

    def deliver(self, source: str, message: Message) -> None:
        """Take in a message of the engine's: Chunks, Accepted or Rejected."""
        if isinstance(message, Chunks):
            for chunk in message.chunks:
                handle = self._ledger.get(chunk.request_id)
                if (
                    handle is None
                    or handle.request.incarnation != chunk.incarnation
                    or not handle.accept(chunk)
                ):
                    self._num_dropped += 1
                elif chunk.finish is not None and not handle.open:
                    self._close(handle)
            return
        if isinstance(message, Accepted):
            handle = self._ledger.get(message.request_id)
            if handle is not None and handle.request.incarnation == message.incarnation:
                handle.prompt_token_ids = message.prompt_token_ids
            return
        assert isinstance(message, Rejected), f"{source} sent a {type(message).__name__}"
        handle = self._ledger.get(message.request_id)
        if handle is None or handle.request.incarnation != message.incarnation:
            self._num_dropped += 1
            return
        handle.fail(error_of(message.error))
        self._close(handle)

    def fail_all(self, error: EngineDeadError) -> None:
        """The engine is gone: every open request raises `error`, and every further `submit`."""
        self.dead = error
        for handle in list(self._ledger.values()):
            handle.fail(copy.copy(error))
            self._close(handle)

    async def wait_idle(self) -> None:
        """Wait until no request is open."""
        while self._ledger:
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._idle.append(waiter)
            await waiter

    def statistics(self) -> dict[str, float]:
        """dropped: chunks and rejections seen before, or of requests that aren't open."""
        return {
            "open": len(self._ledger),
            "requests": self._num_submitted,
            "dropped": self._num_dropped,
        }

    def _refuse_if_unable(self) -> None:
        if self.dead is not None:
            raise copy.copy(self.dead)
        if self.draining:
            raise OverloadedError("the server is shutting down and takes no new requests")
        if not self.room:
            raise OverloadedError(
                f"{self.num_open} requests are running or waiting, "
                "as many as max_num_queued_reqs allows"
            )

    def _close(self, handle: RequestHandle) -> None:
        del self._ledger[handle.request_id]
        if not self._ledger:
            for waiter in self._idle:
                if not waiter.done():
                    waiter.set_result(None)
            self._idle.clear()


def error_of(info: ErrorInfo | None) -> RingcastError:
    """What the engine said, as an exception with its `status`, `param` and `code`."""
    if info is None:
        return RequestFailedError("the request failed inside the engine")
    if info.status == OverloadedError.status:
        return OverloadedError(info.message)
    if info.status >= 500:
        return RequestFailedError(info.message)
    error = InvalidRequestError(info.message, param=info.param, code=info.code)
    error.status = info.status
    return error


def _addressed(output: OutputSpec | None, client: int) -> OutputSpec:
    if output is None:
        return OutputSpec(client=client)
    if output.client == client:
        return output
    return msgspec.structs.replace(output, client=client)
