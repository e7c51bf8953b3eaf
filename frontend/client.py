"""The ledger of a client's requests: what was asked and emitted, and who waits. No transport.

1. A request is in the ledger from `submit` until every one of its choices has had its one terminal:
   a Finish, the request's Rejected, or an end that the client itself gives it.
2. Aborting what the engine has ends nothing by itself. It asks the engine, and the entry stays as a
   tombstone until the engine has answered, so that a late chunk is known for what it is. The caller
   need not wait. What is parked, or has died with its engine, is closed here at once, each open
   choice with a Finish("abort").
3. What has been seen, what is of another incarnation, and what is of a request that isn't in the
   ledger is dropped.

The states of a request, and what is done at an event:

    parked     to be sent when it can be served: it came while it couldn't (something was down that
               all need, or every replica was), or something died under it. With a strike it waits
               for its trial besides.
    open       sent, and a replica works on it
    on trial   as open, and the others with a strike wait until it has shown that it harms nobody
    aborting   to be ended, and the engine has not answered yet
    closed     out of the ledger

    event                      parked             open, on trial             aborting
    can be served (again)      open, or on trial  -                          -
    chunk of this incarnation  -                  to the caller              to the caller
    the last Finish            -                  closed                     closed
    Rejected                   -                  closed, raises             closed, raises
    abort                      closed             aborting                   -
    died, and it is exposed    -                  parked; closed and raises  closed
                                                  as poisonous
    died, and it is not        -                  -                          -; the Abort goes again
    `fail_all`                 closed, raises     closed, raises             closed, raises

Who is exposed to a death, who is poisonous and how the trial goes is in takeover.py; where an
output is resumed in handle.py; which replica a request goes to in routing.py, by which tokenizer
and detokenizer in text_routing.py; what isn't even let in, in admission.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import itertools
import random
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import msgspec

from ..mq.config import ModelSpec
from ..mq.errors import EngineDeadError, OverloadedError, RingcastError
from ..mq.messages import (
    Accepted,
    Chunk,
    Chunks,
    ClientToTokenizer,
    Detokenized,
    Generate,
    Loads,
    Message,
    OutputSpec,
    Ping,
    Prompt,
    Rejected,
    ResetPrefixCache,
    Tokenized,
)
from ..mq.sampling_params import SamplingParams
from ..mq.tallies import QUESTIONS, REQUESTS, Tallies
from .admission import DRAINING, Admission
from .cache_reset import CacheResets, Way
from .handle import RequestHandle, error_of
from .mailbox import Mailbox
from .pulse import Pulse
from .routing import Router
from .takeover import Takeover
from .text_routing import TextRouter, is_text
from .tokenizer_questions import TokenizerQuestions
from .trials import Trials


class Observer(Protocol):
    """Whoever counts what goes through a ledger. It changes nothing there."""

    def opened(self, handle: RequestHandle) -> None:
        """The request has come into the ledger, in the task of whoever asks."""

    def received(self, handle: RequestHandle, chunk: Chunk, now: float) -> None:
        """A chunk that is no duplicate has come."""

    def closed(self, handle: RequestHandle) -> None:
        """The request has left the ledger, by whatever way."""


class EngineClient:
    """Hands requests to an engine and takes its answers. All of it runs on one event loop.

    send: `send(to, message)` to an actor of the engine; must not block.
    index: which client this is ("client.0"), so that the detokenizer knows where to answer.
    seed: of the seeds that are drawn for requests without one; None draws others in each run.
    policy: the engine's scheduling_policy, "fcfs" or "priority". num_engines: its replicas.
    num_tokenizers, num_detokenizers: that serve them. takes_extra_args: it has logits processors.
    routing: its data_parallel_routing, "score" or "prefix". tallies: what this client counts with
    others of the same engine; max_num_queued_reqs is of all together.
    draining: set it, and new requests are refused. dead: what `fail_all` was told. observer: set
    it before the first request.
    """

    def __init__(
        self,
        spec: ModelSpec,
        send: Callable[[str, Message], None],
        index: int = 0,
        max_num_queued_reqs: int = 2048,
        seed: int | None = None,
        policy: str = "fcfs",
        num_engines: int = 1,
        routing: str = "score",
        tallies: Tallies | None = None,
        num_tokenizers: int = 1,
        num_detokenizers: int = 1,
        takes_extra_args: bool = True,
    ) -> None:
        self.spec = spec
        self.index = index
        self.max_num_queued_reqs = max_num_queued_reqs
        self.draining = False
        self.dead: EngineDeadError | None = None
        self.observer: Observer | None = None
        self._send_to = send
        self._tallies = tallies or Tallies.local()
        self._admission = Admission(spec, policy, self._tallies, takes_extra_args)
        self._ledger: dict[str, RequestHandle] = {}
        self._router = Router(num_engines, index, routing)
        self._text = TextRouter(num_tokenizers, num_detokenizers, index)
        self._takeover = Takeover(self._send, self._router, self._text, Trials(self._tallies))
        self._pulse = Pulse(self._ping)
        self._resets = CacheResets(self._reset)
        self._prefix = uuid.uuid4().hex[:8]
        self._questions = TokenizerQuestions(self._send, self._text.tokenizers, index, self._prefix)
        self._random = random.Random(uuid.uuid4().int if seed is None else seed)
        self._idle: list[asyncio.Future[None]] = []
        self._leaving: list[int] = []  # replicas that nothing of ours is to be with
        self._has_left: Callable[[], object] = lambda: None
        self._num_submitted = 0
        self._num_dropped = 0
        self._num_resets = 0

    @property
    def num_open(self) -> int:
        """Requests in the ledger: running, waiting, parked, or aborted and not yet acknowledged."""
        return len(self._ledger)

    @property
    def num_open_of_all(self) -> int:
        """Likewise, of all clients of the engine."""
        return self._tallies.total(REQUESTS)

    @property
    def room(self) -> int:
        """How many more requests `submit` would take now."""
        return max(0, self.max_num_queued_reqs - self._tallies.total(REQUESTS, QUESTIONS))

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams,
        output: OutputSpec | None = None,
        *,
        cache_salt: str = "",
        mailbox: Mailbox | None = None,
        priority: int = 0,
        keep_prompt_tokens: int = 0,
    ) -> RequestHandle:
        """Send a request to a replica, at once or when it can be served.

        Without `output`, each choice comes as raw chunks, few and large. priority: the lower, the
        more urgent. keep_prompt_tokens: as in Generate. Raises OverloadedError when the engine is
        full or drains, EngineDeadError, and InvalidRequestError for a priority or extra_args that
        have no effect and for what the model doesn't do.
        """
        self.check_kind(pooled=output is not None and output.form == "pooled")
        self._admission.check_priority(priority)
        self._admission.check_extra_args(params.extra_args)
        self._refuse_if_unable()
        self._admission.take_place(REQUESTS, self.max_num_queued_reqs)
        try:
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
                priority=priority,
                keep_prompt_tokens=keep_prompt_tokens,
            )
            parked = self._takeover.blocked
            if not parked:
                request = self._text.choose(request, self._router.choose(request))
                self._send(request)
            handle = RequestHandle(request, mailbox or Mailbox(), self.abort, parked)
        except BaseException:
            self._tallies.add(REQUESTS, -1)
            raise
        self._ledger[request.request_id] = handle
        self._track(handle)
        if self.observer is not None:
            self.observer.opened(handle)
        return handle

    def abort(self, handle: RequestHandle) -> None:
        if not handle.open or handle.aborting:
            return
        handle.aborting = True
        self._takeover.abort(handle)
        if handle.parked:
            handle.end_as_aborted()
            self._close(handle)

    def deliver(self, source: str, message: Message) -> None:
        """Take in a message of the engine's: Chunks, Accepted, Rejected, Loads, or an answer."""
        if isinstance(message, Chunks):
            self._pulse.beat()
            takeover, observer, now = self._takeover, self.observer, time.monotonic()
            for chunk in message.chunks:
                handle = self._ledger.get(chunk.request_id)
                if (
                    handle is None
                    or handle.request.incarnation != chunk.incarnation
                    or not handle.accept(chunk)
                ):
                    self._num_dropped += 1
                    continue
                if observer is not None:
                    observer.received(handle, chunk, now)
                if chunk.finish is not None:
                    self._track(handle)
                if not handle.open:
                    self._close(handle)
                elif handle is takeover.on_trial and handle.proven:
                    takeover.settle(handle)
        elif isinstance(message, Ping):
            self._pulse.beat()
        elif isinstance(message, ResetPrefixCache):
            self._pulse.beat()
            way = message.engine, message.tokenizer
            self._num_dropped += not self._resets.answered(message.request_id, way)
        elif isinstance(message, Loads):
            self._router.publish(message)
        elif isinstance(message, Tokenized | Detokenized):
            self._num_dropped += not self._questions.answered(message)
        else:
            assert isinstance(message, Accepted | Rejected), f"{source} sent {message!r}"
            if isinstance(message, Rejected) and self._questions.answered(message):
                return
            handle = self._ledger.get(message.request_id)
            if handle is None or handle.request.incarnation != message.incarnation:
                self._num_dropped += 1
            elif isinstance(message, Accepted):
                handle.prompt_token_ids = message.prompt_token_ids
                handle.accepted = True
                self._text.track(handle)
            else:
                handle.fail(error_of(message.error))
                self._close(handle)

    def lost(self, names: Sequence[str], error: str, from_outside: bool = False) -> None:
        """These actors have died, and all that they had sent has been delivered."""
        if self.dead is not None:
            return
        for handle in self._takeover.lost(names, error, from_outside, self._ledger.values()):
            self._close(handle)
        self._questions.blame(error)
        if self._takeover.blocked:
            self._pulse.stop()
            return
        if is_text(names):  # what went by them and others can do
            self._resets.send_again(self._ways)
            self._questions.send_again()
            self._pulse.ask_again()
        else:
            self._resets.lost(self._ways)
        self._takeover.resume(self._ledger.values())
        self._see_whether_left()

    def leave(self, names: Sequence[str], done: Callable[[], object]) -> None:
        """These will be removed: nothing new is sent there. Calls `done` when nothing of ours runs
        there, at once or later."""
        engines = [int(n.partition(".")[2]) for n in names if n.startswith("scheduler.")]
        for engine in engines:
            self._router.leave(engine)
        self._leaving, self._has_left = engines, done
        self._see_whether_left()

    def removed(self, names: Sequence[str]) -> None:
        """These are no more: who was with them goes on elsewhere."""
        if self.dead is not None:
            return
        for handle in self._takeover.removed(names, self._ledger.values()):
            self._close(handle)
        if not self._takeover.blocked:
            self._resets.lost(self._ways)
            self._takeover.resume(self._ledger.values())
        self._see_whether_left()

    def _see_whether_left(self) -> None:
        if self._leaving and not any(self._router.num_own(engine) for engine in self._leaving):
            self._leaving = []
            self._has_left()

    def regained(self, names: Sequence[str]) -> None:
        """New incarnations of these actors are ready."""
        was_blocked = self._takeover.blocked
        if self.dead is not None:
            return
        self._takeover.regained(names)
        self._takeover.resume(self._ledger.values())
        self._see_whether_left()
        if was_blocked and not self._takeover.blocked:
            self._resets.send_again(self._ways)
            self._questions.send_again()

    def fail_all(self, error: EngineDeadError) -> None:
        """The engine is gone: every open request raises `error`, and every further `submit`."""
        self.dead = error
        self._takeover.stop()
        self._pulse.stop()
        self._resets.fail(error)
        self._questions.fail(error)
        for handle in list(self._ledger.values()):
            handle.fail(copy.copy(error))
            self._close(handle)

    async def tokenize(self, prompt: Prompt, with_texts: bool = False) -> Tokenized:
        """A prompt's tokens, as the tokenizer actor makes them. Raises as `submit` does."""
        with self._question():
            return await self._questions.tokenize(prompt, with_texts, not self._takeover.blocked)

    async def detokenize(self, token_ids: bytes) -> str:
        """The text of tokens (i32 bytes), special ones included. Raises as `submit` does."""
        with self._question():
            return await self._questions.detokenize(token_ids, not self._takeover.blocked)

    async def wait_idle(self) -> None:
        """Wait until no request is open, and nothing is asked of the tokenizer."""
        while self._ledger or self._questions.num_open:
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._idle.append(waiter)
            await waiter

    async def trouble(self, seconds: float) -> RingcastError | None:
        """Why a request that came now might not be served; None if it would be.

        Waits up to `seconds` for an engine that has been silent.
        """
        if (known := self._known_trouble()) is not None:
            return known
        alive = await self._pulse.check(seconds)
        known = self._known_trouble()  # there may be some by now
        if known is None and not alive:
            return OverloadedError(f"the engine has not answered for {seconds:g} s")
        return known

    async def reset_prefix_cache(self) -> bool:
        """Let nothing that the engine has computed before be found by requests that come after.

        Requests that run go on. True: unlike vLLM's, it needs no idle engine. Done when all live
        replicas have done it; where there are none, one that is being restarted is waited for.
        Raises EngineDeadError.
        """
        if self.dead is not None:
            raise copy.copy(self.dead)
        self._num_resets += 1
        name = f"{self._prefix}-reset-{self._num_resets}"
        self._router.forget_prefixes()
        await self._resets.ask(name, [] if self._takeover.blocked else self._ways)
        return True

    def statistics(self) -> dict[str, float]:
        """dropped: what was seen before, or is of requests or incarnations that aren't open.

        takeovers: requests handed over again after a death, each time. parked: those that wait now.
        """
        return {
            "open": len(self._ledger),
            "requests": self._num_submitted,
            "dropped": self._num_dropped,
            "takeovers": self._takeover.num_takeovers,
            "parked": sum(handle.parked for handle in self._ledger.values()),
            "poisoned": self._takeover.num_poisoned,
        }

    def _known_trouble(self) -> RingcastError | None:
        if self.dead is not None:
            return self.dead
        if self.draining:
            return OverloadedError(DRAINING)
        if missing := self._takeover.missing:
            names = ", ".join(missing)
            return OverloadedError(f"{names} will be started again: {self._takeover.last_death}")
        return None

    def check_kind(self, pooled: bool) -> None:
        """Raises InvalidRequestError unless this model makes vectors (pooled), or generates."""
        self._admission.check_kind(pooled)

    def _refuse_if_unable(self) -> None:
        if self.dead is not None:
            raise copy.copy(self.dead)
        if self.draining:
            raise OverloadedError(DRAINING)

    @contextlib.contextmanager
    def _question(self) -> Iterator[None]:
        """Something is asked of the tokenizer."""
        self._refuse_if_unable()
        self._admission.take_place(QUESTIONS, self.max_num_queued_reqs)
        try:
            yield
        finally:
            self._tallies.add(QUESTIONS, -1)
            self._wake_if_idle()

    def _send(self, message: ClientToTokenizer) -> None:
        self._send_to(f"tokenizer.{message.tokenizer}", message)

    def _ping(self, number: int) -> None:
        """Any replica's answer will do: one is enough to serve."""
        by = self._text.tokenizers.choose(), self._text.detokenizers.choose()
        for engine in self._router.live:
            self._send(Ping(self.index, number, engine, *by))

    def _reset(self, name: str, way: Way) -> None:
        detokenizer = self._text.detokenizers.choose()
        self._send(ResetPrefixCache(self.index, name, *way, detokenizer))

    @property
    def _ways(self) -> list[Way]:
        """To all replicas that live, by all tokenizers that do."""
        return list(itertools.product(self._router.live, self._text.tokenizers.live))

    def _track(self, handle: RequestHandle) -> None:
        self._router.track(handle)
        self._text.track(handle)

    def _close(self, handle: RequestHandle) -> None:
        del self._ledger[handle.request_id]
        self._tallies.add(REQUESTS, -1)
        self._track(handle)
        self._takeover.settle(handle)
        self._see_whether_left()
        if self.observer is not None:
            self.observer.closed(handle)
        self._wake_if_idle()

    def _wake_if_idle(self) -> None:
        if not self._ledger and not self._questions.num_open:
            for waiter in self._idle:
                if not waiter.done():
                    waiter.set_result(None)
            self._idle.clear()


def _addressed(output: OutputSpec | None, client: int) -> OutputSpec:
    if output is None:
        return OutputSpec(client=client)
    if output.client == client:
        return output
    return msgspec.structs.replace(output, client=client)
