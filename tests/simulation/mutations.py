"""Mistakes to put into the shipped cores, to see that the simulation isn't blind.

Each replaces one function by one that is a little wrong, in the way in which it might have been
written. `most` is the number of seeds (of the profiles that can show it) within which it must be
found.

That received messages are committed before their effects are sent is not among them: a reader that
dies finds nothing waiting when it comes again, and its clients hand everything over once more. So
nothing depends on the order.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import msgspec

from ringcast.actors import coordinator_core, elastic, lifecycle
from ringcast.actors.core import PeerLost
from ringcast.actors.scheduler import core as scheduler_core
from ringcast.actors.scheduler import kv_cache, planner, waves
from ringcast.actors.text import detokenizer_core, event_renderer, text_stream, tokenizer_core
from ringcast.frontend import client, handle, takeover
from ringcast.mq import messages

from . import lockstep, world

Function = Callable[..., Any]
_CRASHES = ("crashes", "storm", "poison and crashes")


@dataclass(frozen=True)
class Mutation:
    """`make` gets the right function and returns the wrong one."""

    name: str
    owner: Any
    function: str
    make: Callable[[Function], Function]
    profiles: tuple[str, ...] = ()  # all
    most: int = 40
    slow: bool = False  # to find

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        right = getattr(self.owner, self.function)
        with mock.patch.object(self.owner, self.function, self.make(right)):
            yield


def find(mutation: Mutation) -> tuple[int, int] | None:
    """The first seed that finds it, and how many were tried; None if none of them does."""
    tried = 0
    seed = 0
    with mutation.applied():
        while tried < mutation.most:
            if not mutation.profiles or world.profile(seed) in mutation.profiles:
                tried += 1
                try:
                    world.run(seed)
                except Exception:
                    return seed, tried
            seed += 1
    return None


def find_in_lockstep(mutation: Mutation) -> int | None:
    """The first seed of replicas that step together that finds it; None if none does."""
    with mutation.applied():
        for seed in range(mutation.most):
            try:
                lockstep.run(seed)
            except Exception:
                return seed
    return None


def _nothing(right: Function) -> Function:
    return lambda *args, **options: ()


def _never(right: Any) -> bool:
    """Instead of a property."""
    return False


def _without(kind: type, result: Any = ()) -> Callable[[Function], Function]:
    """`handle` that does nothing with messages of a kind."""

    def make(right: Function) -> Function:
        def handle(self: Any, source: str, message: Any, now: float) -> Any:
            return result if isinstance(message, kind) else right(self, source, message, now)

        return handle

    return make


def _to_first(kind: type) -> Callable[[Function], Function]:
    """`handle` that sends messages of a kind to the first replica, whichever they are for."""

    def make(right: Function) -> Function:
        def handle(self: Any, source: str, message: Any, now: float) -> Any:
            if isinstance(message, kind):
                message = msgspec.structs.replace(message, engine=0)
            return right(self, source, message, now)

        return handle

    return make


def _by_another(right: Function) -> Function:
    def send(self: Any, message: Any) -> None:
        if isinstance(message, messages.Abort):
            live = self._text.tokenizers.live
            tokenizer = live[live.index(message.tokenizer) - 1]
            message = msgspec.structs.replace(message, tokenizer=tokenizer)
        right(self, message)

    return send


def _next_one(right: Function) -> Function:
    def of(self: Any, number: int, items: Any) -> Any:
        return right(self, (number + 1) % len(self._parts), items)

    return of


def _to_first_detokenizer(right: Function) -> Function:
    def add(self: Any, request: Any) -> Any:
        return msgspec.structs.replace(right(self, request), detokenizer=0)

    return add


def _of_all(right: Function) -> Function:
    def lose(self: Any, peer: str) -> None:
        names = self._detokenizers if peer in self._detokenizers else [peer]
        for name in names:
            right(self, name)

    return lose


def _twice(right: Function) -> Function:
    def end(self: Any, *args: Any, **options: Any) -> None:
        right(self, *args, **options)
        self._outbox.ends.append(self._outbox.ends[-1])

    return end


def _repeated_token(right: Function) -> Function:
    def drain(self: Any) -> Any:
        if len(self.streams) == 1 and self.token_index[0] == 2 and not self.ends:
            self.streams *= 2
            self.token_index.append(3)
            self.token_ids *= 2
        return right(self)

    return drain


def _unchecked_index(right: Function) -> Function:
    def push(self: Any, index: int, token_id: int, ends_here: bool) -> Any:
        return right(self, self.num_tokens, token_id, ends_here)

    return push


def _kept_copy(right: Function) -> Function:
    def release(self: Any, sequence: Any) -> None:
        sequence.copy_sources = []
        right(self, sequence)

    return release


def _kept_computed(right: Function) -> Function:
    def release(self: Any, sequence: Any) -> None:
        computed = sequence.num_computed
        right(self, sequence)
        sequence.num_computed = min(computed, 1)

    return release


def _kept_token(right: Function) -> Function:
    """What a step in flight has sampled for a sequence that has ended is taken for the output."""

    def forget(self: Any, sequence: Any) -> None:
        right(self, sequence)
        sequence.ended = False

    return forget


def _no_tokens_awaited(right: Function) -> Function:
    def plan(self: Any, number: int, oldest: int, even_empty: bool = False) -> Any:
        return right(self, number, number, even_empty)

    return plan


def _swapped_choices(right: Function) -> Function:
    def fork(self: Any, source: Any, siblings: list[Any]) -> None:
        if len(siblings) > 1:
            siblings[0].choice, siblings[1].choice = siblings[1].choice, siblings[0].choice
        right(self, source, siblings)

    return fork


def _any_incarnation(right: Function) -> Function:
    def deliver(self: Any, source: str, message: Any) -> None:
        if isinstance(message, messages.Chunks):
            chunks = []
            for chunk in message.chunks:
                known = self._ledger.get(chunk.request_id)
                incarnation = chunk.incarnation if known is None else known.request.incarnation
                chunks.append(msgspec.structs.replace(chunk, incarnation=incarnation))
            message = messages.Chunks(chunks)
        right(self, source, message)

    return deliver


def _older_too(right: Function) -> Function:
    def add(self: Any, message: messages.AddRequest) -> None:
        old = self._requests.pop(message.request_id, None)
        right(self, message)
        if old is not None:
            self._requests[message.request_id].open.update(old.open)

    return add


def _one_token_less(right: Function) -> Function:
    def resume(self: Any) -> Any:
        return [msgspec.structs.replace(one, token_ids=one.token_ids[:-4]) for one in right(self)]

    return resume


def _all_emitted(right: Function) -> Function:
    def park(self: Any) -> None:
        self._resume_at = [len(emitted) for emitted in self.emitted]
        right(self)

    return park


def _all_but_one(right: Function) -> Function:
    def resume(self: Any, ledger: Any) -> None:
        right(self, list(ledger)[:-1])

    return resume


def _no_trial(right: Function) -> Function:
    def try_next(self: Any) -> None:
        while self._waiting:
            right(self)

    return try_next


def _unread_text(right: Function) -> Function:
    def resume(self: Any, bytes_of: Any) -> None:
        self._first_index = self.num_tokens = len(self.opened.resumed) // 4

    return resume


def _first_only(right: Function) -> Function:
    def lose(self: Any, peer: str) -> Any:
        return right(self, peer)[:1]

    return lose


def _no_waiting(right: Function) -> Function:
    def may(self: Any, unit: Any) -> bool:
        unanswered, self._unanswered = self._unanswered, {}
        try:
            return bool(right(self, unit))
        finally:
            self._unanswered = unanswered

    return may


def _only_while_paused(right: Function) -> Function:
    def start(self: Any, message: Any) -> None:
        if self.paused:
            right(self, message)

    return start


def _ends_by_itself(right: Function) -> Function:
    """Who has sent many dummy steps takes it that nobody has work."""

    def hear(self: Any, any_work: bool) -> None:
        right(self, any_work and self.dummy_steps % 8 < 7)

    return hear


def _one_more(right: Function) -> Function:
    """A replica sends a step more than the others when its wave ends."""

    def hear(self: Any, any_work: bool) -> None:
        before = self._ends
        right(self, any_work)
        if self._ends and not before and self.dummy_steps % 2:
            self._may += 1

    return hear


def _kept_wave(right: Function) -> Function:
    def lose(self: Any, engine: int) -> None:
        started = self._started
        right(self, engine)
        self._started, self._asks = started, False

    return lose


def _any_wave(right: Function) -> Function:
    def start(self: Any, message: Any) -> None:
        right(self, messages.StartWave(self._known + 1))

    return start


_SCHEDULER = scheduler_core.SchedulerCore
_DETOKENIZER = detokenizer_core.DetokenizerCore
_TOKENIZER = tokenizer_core.TokenizerCore

MUTATIONS = [
    Mutation("the tokenizer loses aborts", _TOKENIZER, "handle", _without(messages.Abort)),
    Mutation("the scheduler loses aborts", _SCHEDULER, "_abort", _nothing),
    Mutation("an end is said twice", _SCHEDULER, "_end", _twice),
    Mutation("a token is sent twice", scheduler_core.Outbox, "drain", _repeated_token),
    Mutation("a copied block isn't freed", kv_cache.KVCache, "release", _kept_copy, most=80),
    Mutation("a preempted one keeps a token", kv_cache.KVCache, "release", _kept_computed),
    Mutation("a token of one that has ended is kept", _SCHEDULER, "_forget", _kept_token),
    Mutation("a preempted one comes back too early", planner.Planner, "plan", _no_tokens_awaited),
    Mutation("a fork gets another's choice", planner.Planner, "fork", _swapped_choices),
    Mutation("ends aren't passed on", _DETOKENIZER, "_end", _nothing),
    Mutation("pings are lost", _DETOKENIZER, "handle", _without(messages.Ping)),
    Mutation("an older incarnation goes on", _SCHEDULER, "_add", _older_too, _CRASHES, 150),
    Mutation(
        "a dead client's requests come", _TOKENIZER, "handle", _without(PeerLost), _CRASHES, 150
    ),
    Mutation(
        "one replica alone hears of a dead client", _TOKENIZER, "_lose", _first_only, _CRASHES
    ),
    Mutation(
        "a replica's death is everybody's",
        takeover,
        "_was_with",
        lambda right: lambda handle, names: True,
        _CRASHES,
    ),
    Mutation(
        "an abort goes by another tokenizer", client.EngineClient, "_send", _by_another, most=100
    ),
    Mutation("a stream is opened elsewhere", scheduler_core.Outbox, "_of", _next_one),
    Mutation("a tokenizer forgets the detokenizer", _TOKENIZER, "_add", _to_first_detokenizer),
    Mutation(
        "a detokenizer's death is all streams'",
        _SCHEDULER,
        "_lose",
        _of_all,
        _CRASHES,
        slow=True,
    ),
    Mutation(
        "a client's end by one tokenizer ends what came by others",
        _SCHEDULER,
        "_abort_client",
        lambda right: lambda self, client, tokenizer="": right(self, client),
        _CRASHES,
        300,
        slow=True,
    ),
    Mutation("pings go to one replica", _TOKENIZER, "handle", _to_first(messages.Ping)),
    Mutation("the scheduler forgets nothing", _SCHEDULER, "_lose", _nothing, _CRASHES),
    Mutation("the detokenizer forgets nothing", _DETOKENIZER, "_forget", _nothing, _CRASHES),
    Mutation("resumed text isn't read", text_stream.TextStream, "resume", _unread_text, _CRASHES),
    Mutation("a role is said again", event_renderer.EventRenderer, "resume", _nothing, _CRASHES),
    Mutation(
        "old chunks are accepted", client.EngineClient, "deliver", _any_incarnation, _CRASHES, 150
    ),
    Mutation(
        "a resume is one token short",
        handle.RequestHandle,
        "_resume",
        _one_token_less,
        _CRASHES,
        100,
    ),
    Mutation("what wasn't shown is resumed", handle.RequestHandle, "park", _all_emitted, _CRASHES),
    Mutation("a parked one isn't sent", takeover.Takeover, "resume", _all_but_one, _CRASHES),
    Mutation("what ran on a removed replica is lost", takeover.Takeover, "removed", _nothing),
    Mutation("a scale waits for nobody", elastic.ElasticLifecycle, "_any_starting", _never),
    Mutation("suspects go together", takeover.Takeover, "_try_next", _no_trial, ("poison",)),
    Mutation("poison has a third try", takeover, "MAX_STRIKES", lambda right: 3, ("poison",)),
    Mutation(
        "nobody waits for who forgets",
        lifecycle.Lifecycle,
        "_may_start",
        _no_waiting,
        _CRASHES,
        150,
        slow=True,
    ),
    Mutation(
        "newcomers aren't told", lifecycle.Lifecycle, "_bring_up_to_date", _nothing, _CRASHES, 300
    ),
]

_WAVES = waves.Waves

LOCKSTEP_MUTATIONS = [
    Mutation("who is in a wave hears of no other", _WAVES, "start", _only_while_paused, most=100),
    Mutation("every word starts a wave", _WAVES, "start", _any_wave),
    Mutation("a replica ends a wave by itself", _WAVES, "hear", _ends_by_itself),
    Mutation("a replica sends one plan more", _WAVES, "hear", _one_more),
    Mutation("a new coordinator isn't answered", _WAVES, "ask", _nothing, most=100),
    Mutation(
        "the coordinator keeps a dead one's wave",
        coordinator_core.CoordinatorCore,
        "_lose",
        _kept_wave,
    ),
]
