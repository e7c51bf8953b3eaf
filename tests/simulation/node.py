"""The actors' shells in the simulation: one thing at a time, a pause after every effect.

A node runs *jobs*, which are generators: a batch of messages, a message of the supervisor's, an
act of a user. Each yield is a place where time passes, where others run, and where it can die.
What a job yields is how long it pauses, or None until somebody wakes it.

Mirrored are, of actors/: base.py (`Actor.on_batch`) and links.py (`Links._pump`, its draining of a
dead peer's channels, and Outbox).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, Any

from ringcast.actors.core import Send
from ringcast.mq import codec, messages, supervision

from .network import Inbound, Outbox

if TYPE_CHECKING:
    from .world import World

Job = Generator[float | None, None, None]


class Node:
    """One incarnation of an actor. state: "starting", "ready" or "dead"."""

    def __init__(self, world: World, name: str, generation: int) -> None:
        self.world = world
        self.name = name
        self.generation = generation
        self.index = int(name.partition(".")[2])
        self.state = "starting"
        self.stalled_until = 0.0
        self.reaped = False
        self.outboxes: dict[str, Outbox] = {}
        self.inbounds: list[Inbound] = []
        self._removed: set[str] = set()
        self._ends = world.network.ends(name)  # that it is born with
        self._orders: deque[Any] = deque()  # of the supervisor, and acts of users
        self._scheduled = False
        self._job: Job | None = self._start()
        self._run()

    # What the world does with it

    def wake(self) -> None:
        if self.state != "dead" and not self._scheduled:
            self._scheduled = True
            self.world.clock.after(self.world.delay(self.world.scenario.wake), self._run)

    def order(self, message: Any) -> None:
        """A message of the supervisor, or something to call."""
        if self.state != "dead":
            self._orders.append(message)
            self.wake()

    def die(self, why: str) -> None:
        if self.state == "dead":
            return
        self.world.died(self, why)
        self.close()

    def close(self) -> None:
        """It is no more, and nobody is told."""
        self.state = "dead"
        if self._job is not None and not self._job.gi_running:
            self._job.close()
        for end in (*self.outboxes.values(), *self.inbounds):
            end.close()

    @property
    def idle(self) -> bool:
        return (
            self.state == "ready"
            and self._job is None
            and not self._orders
            and not any(outbox.waiting for outbox in self.outboxes.values())
        )

    def statistics(self) -> dict[str, float]:
        return {}

    # What it does

    def _run(self) -> None:
        self._scheduled = False
        world = self.world
        if self.state == "dead" or world.strikes(self):
            return
        if self.stalled_until > world.clock.now:
            self._scheduled = True
            if self.stalled_until < math.inf:
                world.clock.after(self.stalled_until - world.clock.now, self._run)
            return
        if self._job is None:
            self._job = self._next_job()
            if self._job is None:
                return
        try:
            pause = next(self._job)
        except StopIteration:
            self._job = None
            pause = world.delay(world.scenario.pause)
        if pause is not None and self.state != "dead":
            self._scheduled = True
            world.clock.after(pause, self._run)

    def _next_job(self) -> Job | None:
        for outbox in self.outboxes.values():
            if outbox.go_on():
                return _nothing()
        if self._orders and self.world.rng.random() < 0.5:
            return self._obey(self._orders.popleft())
        batch, taken = self._take()
        if batch:
            return self._act(batch, taken)
        if self._orders:
            return self._obey(self._orders.popleft())
        return None

    def _take(self) -> tuple[list[tuple[str, Any]], list[Inbound]]:
        """Links._take_round: channels are read in the reverse order, and handled in order."""
        batch: list[tuple[str, Any]] = []
        taken = []
        for inbound in reversed(self.inbounds):
            if inbound.suspended:
                continue
            if arrived := inbound.take(self.world.scenario.batch):
                taken.append(inbound)
                batch[:0] = arrived
        return batch, taken

    def _act(self, batch: list[tuple[str, Any]], taken: Sequence[Inbound]) -> Job:
        sent: list[tuple[str, Any]] = []
        yield from self._handle(batch, sent)
        self.world.wire.batch(self, batch, sent)
        for inbound in taken:
            inbound.commit()
            self.world.wake((inbound.source,))

    def _handle(self, batch: list[tuple[str, Any]], sent: list[tuple[str, Any]]) -> Job:
        raise NotImplementedError

    def _send(self, effects: Sequence[Send], sent: list[tuple[str, Any]]) -> Job:
        for to, message in effects:
            payload = codec.encode(message)
            self.world.wire.sent(self, to, message, payload)
            sent.append((to, message))
            if to not in self._removed:
                self.outboxes[to].put(payload)
            yield self.world.delay(self.world.scenario.pause)

    def _start(self) -> Job:
        yield self.world.delay(self.world.scenario.start)
        self.outboxes, self.inbounds = self.world.network.open(self.name, self._ends)
        self._make()
        yield self.world.delay(self.world.scenario.pause)
        self.state = "ready"
        self._tell(supervision.ActorReady())

    def _make(self) -> None:
        raise NotImplementedError

    def _tell(self, message: messages.Message) -> None:
        self.world.supervisor.heard(self, message)

    def _obey(self, order: Any) -> Job:
        match order:
            case supervision.PeersLost():
                yield from self._lose(order)
            case supervision.PeersBack(names=names):
                for inbound in self.inbounds:
                    if inbound.source in names:
                        inbound.suspended = False
                yield from self._regain(names)
            case supervision.PeersAdded():
                yield from self._add(order)
            case supervision.Shutdown():
                self.die("exit status 0")
            case _:
                yield from self._obey_more(order)

    def _obey_more(self, order: Any) -> Job:
        raise AssertionError(f"{self.name} was told {order!r}")

    def _lose(self, order: supervision.PeersLost) -> Job:
        lost = set(order.lost)
        unheard = [inbound for inbound in self.inbounds if inbound.source in lost]
        for inbound in unheard:
            inbound.suspended = False  # somebody between the last one heard and this death
        while not all(inbound.suspended for inbound in unheard):
            batch, taken = self._take()
            if not batch:
                break  # they live again already: who has just started is told of deaths before it
            yield from self._act(batch, taken)
        for inbound in unheard:
            inbound.suspended = True
        for outbox in self.outboxes.values():
            if lost.intersection(outbox.edge.readers):
                outbox.waiting.clear()
        yield from self._forget(order)
        if order.removed:
            self._remove(lost)
        self._tell(supervision.PeersForgotten(order.death))

    def _add(self, order: supervision.PeersAdded) -> Job:
        """Links.add, and what follows."""
        network, names = self.world.network, set(order.names)
        outboxes, inbounds = network.open(self.name, network.ends(self.name, names))
        self.outboxes |= outboxes
        self.inbounds += inbounds
        self._removed -= names
        yield from self._welcome(order.names)
        self._tell(supervision.PeersForgotten(order.number))

    def _welcome(self, names: Sequence[str]) -> Job:
        yield from ()

    def _remove(self, names: set[str]) -> None:
        """Links.remove."""
        for to in [to for to in self.outboxes if to in names]:
            self.outboxes.pop(to).close()
            self._removed.add(to)
        for inbound in [inbound for inbound in self.inbounds if inbound.source in names]:
            self.inbounds.remove(inbound)
            inbound.close()

    def _forget(self, order: supervision.PeersLost) -> Job:
        raise NotImplementedError

    def _regain(self, names: Sequence[str]) -> Job:
        yield from ()


def _nothing() -> Job:
    yield from ()
