"""The actors' shells in the simulation: one thing at a time, a pause after every effect.

A node runs *jobs*, which are generators: a batch of messages, a message of the supervisor's, an
act of a user. Each yield is a place where time passes, where others run, and where it can die.
What a job yields is how long it pauses, or None until somebody wakes it.

Mirrored are, of actors/: base.py (`Actor.on_batch`), links.py (`Links._pump`, its draining of a
dead peer's channels, and Outbox), worker.py (`Worker.run`), and frontend/http/actor.py (`ApiServer`
but for HTTP).
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, deque
from collections.abc import Callable, Generator, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

import numpy as np

from ringcast.actors import topology
from ringcast.actors.coordinator_core import CoordinatorCore
from ringcast.actors.core import Core, PeerAdded, PeerLost, Send
from ringcast.actors.scheduler.core import SchedulerCore
from ringcast.actors.text.detokenizer_core import DetokenizerCore
from ringcast.actors.text.tokenizer_core import TokenizerCore
from ringcast.executor.fake_runner import FakeModelRunner
from ringcast.executor.lockstep import check_places
from ringcast.frontend.client import EngineClient
from ringcast.mq import codec, messages, supervision
from ringcast.mq.errors import EngineDeadError

from .network import Inbound, Outbox
from .scenario import POISON, POISON_AT

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


class CoreNode(Node):
    """The tokenizer, a scheduler, the detokenizer or the coordinator."""

    core: Core
    _timer = False

    def _make(self) -> None:
        world = self.world
        spec, tokenizer = world.scenario.spec, world.tokenizer
        match self.name.partition(".")[0]:
            case "tokenizer":
                replicas = topology.num_engines(world.graph)
                today = datetime(2026, 1, 1)
                self.core = TokenizerCore(spec, tokenizer, replicas, clock=lambda: today)
            case "coordinator":
                counts = world.graph
                lockstep = world.scenario.config.lockstep
                self.core = core = CoordinatorCore(
                    counts["scheduler"], counts["client"], lockstep=lockstep
                )
                self._set_timer(core)
            case "scheduler":
                config = world.scenario.config
                self.core = SchedulerCore(
                    config,
                    spec,
                    num_workers=config.num_workers,
                    name=self.name,
                    has_coordinator=world.graph["coordinator"] > 0,
                    num_tokenizers=config.tokenizer_count,
                    num_detokenizers=config.detokenizer_count,
                )
            case "detokenizer":
                self.core = DetokenizerCore(spec, tokenizer)

    def statistics(self) -> dict[str, float]:
        return self.core.statistics() if self.state == "ready" else {}

    def _handle(self, batch: list[tuple[str, Any]], sent: list[tuple[str, Any]]) -> Job:
        now = self.world.clock.now
        for source, message in batch:
            yield from self._send(self.core.handle(source, message, now), sent)
        yield from self._send(self.core.flush(now), sent)
        if isinstance(self.core, SchedulerCore):
            self.core.check()
        elif isinstance(self.core, CoordinatorCore):
            self._set_timer(self.core)

    def _set_timer(self, core: CoordinatorCore) -> None:
        """Coordinator._set_timer of actors/coordinator.py."""
        if core.due is not None and not self._timer:
            self._timer = True
            self.world.clock.after(max(0.0, core.due - self.world.clock.now), self.order, "flush")

    def _obey_more(self, order: Any) -> Job:
        assert order == "flush", f"{self.name} was told {order!r}"
        self._timer = False
        yield from self._handle([], [])

    def _welcome(self, names: Sequence[str]) -> Job:
        yield from self._handle([(name, PeerAdded()) for name in names], [])

    def _forget(self, order: supervision.PeersLost) -> Job:
        sent: list[tuple[str, Any]] = []
        yield from self._handle([(name, PeerLost()) for name in order.lost], sent)
        self.world.wire.forgot(self, order.lost, [message for _, message in sent])


class WorkerNode(Node):
    """A worker with the fake runner. Poisonous prompts kill the one that answers, before it does.

    killers: the requests of which it died. place: in the meeting of replicas that step together,
    where it waits for the others.
    """

    def __init__(self, world: World, name: str, generation: int) -> None:
        self.killers: list[str] = []
        self.place: tuple[int, int, int] | None = None
        self._num_meetings = 0
        self._any_work = False
        super().__init__(world, name, generation)

    def _make(self) -> None:
        config = self.world.scenario.config
        rank = topology.rank_of(self.name, self.world.scenario.counts)
        self._answers = rank == config.output_rank
        self._runner = FakeModelRunner(config, self.world.scenario.spec, rank)
        if config.lockstep:
            self._runner.meet = lambda place, tokens: self._any_work
        self._poisonous: dict[int, tuple[str, list[int]]] = {}
        self._first = [self._runner.load(lambda *_: None)]

    def _next_job(self) -> Job | None:
        if self._orders:
            return self._obey(self._orders.popleft())
        if self._first:
            return self._answer(self._first.pop())
        (inbound,) = self.inbounds
        taken = inbound.take(1)
        return self._step(inbound, taken[0][1]) if taken else None

    def _step(self, inbound: Inbound, plan: Any) -> Job:
        yield self.world.delay(self.world.scenario.step)
        if self._answers:
            self._taste(plan)
        if self.killers:
            self.die("killed by what it computed")
            return
        if plan.wave is not None:
            yield from self._meet(plan.wave)
        output = self._runner.execute(plan)
        if self._answers:
            yield from self._answer(output)
        inbound.commit()
        self.world.wake((inbound.source,))

    def _meet(self, wave: messages.WaveStep) -> Job:
        """Wait until the workers of all replicas have come."""
        self._any_work = wave.has_work
        self.place = (self._num_meetings, wave.wave, wave.step)
        nodes = self.world.supervisor.nodes.values()
        workers = [node for node in nodes if isinstance(node, WorkerNode)]
        if all(worker.place is not None and worker.state == "ready" for worker in workers):
            check_places(np.array([worker.place for worker in workers], np.int32))
            any_work = any(worker._any_work for worker in workers)
            for worker in workers:
                worker.place, worker._any_work = None, any_work
                worker._num_meetings += 1
                worker.wake()
        while self.place is not None:
            yield None

    def _answer(self, message: Any) -> Job:
        (outbox,) = self.outboxes.values()
        payload = codec.encode(message)
        self.world.wire.sent(self, outbox.edge.readers[0], message, payload)
        while not outbox.try_send(payload):
            yield None
        yield self.world.delay(self.world.scenario.pause)

    def _taste(self, plan: messages.StepPlan) -> None:
        """_poisonous, by row: the request; outputs until it kills, tokens until the next output."""
        poisonous = self._poisonous
        for row in codec.ints(plan.removed).tolist():
            poisonous.pop(row, None)
        for new in plan.new:
            tokens = codec.ints(new.token_ids).tolist()
            if tokens[0] == POISON:
                outputs = len(tokens) - new.num_prompt_tokens
                left = len(tokens) - new.num_computed_tokens
                state = [tokens[1] - POISON_AT - outputs, left]
                poisonous[new.row] = new.request_id, state
        rows, counts = codec.ints(plan.rows).tolist(), codec.ints(plan.num_tokens).tolist()
        for row, count in zip(rows, counts, strict=True):
            if row in poisonous:
                request_id, state = poisonous[row]
                state[1] -= count
                if not state[1]:  # it is sampled
                    if not state[0]:
                        self.killers.append(request_id)
                    state[:] = state[0] - 1, 1


class ClientNode(Node):
    """An API server: its ledger is real, its users are users.py's."""

    def _make(self) -> None:
        self.open = False
        self.pongs: set[messages.Ping] = set()  # that have come back
        self._collected: list[Send] = []
        self._draining = False
        self.losses: Counter[str] = Counter()  # that it was told of, by who was lost
        scenario = self.world.scenario
        self.client = EngineClient(
            scenario.spec,
            lambda to, message: self._collected.append(Send(to, message)),
            self.index,
            scenario.max_queued,
            seed=scenario.seed,
            policy=scenario.config.scheduling_policy,
            num_engines=topology.num_engines(self.world.graph),
            routing=scenario.config.data_parallel_routing,
            num_tokenizers=scenario.config.tokenizer_count,
            num_detokenizers=scenario.config.detokenizer_count,
        )

    def ping(self, number: int) -> None:
        """Every replica, by every tokenizer and detokenizer that there is."""
        for ping in self.pings(number):
            self._collected.append(Send(f"tokenizer.{ping.tokenizer}", ping))

    def pings(self, number: int) -> list[messages.Ping]:
        gone = self.world.supervisor.life.given_up

        def live(kind: str) -> list[int]:
            names = self.world.instances(kind)
            return [int(name.partition(".")[2]) for name in names if name not in gone]

        ways = itertools.product(live("scheduler"), live("tokenizer"), live("detokenizer"))
        return [messages.Ping(self.index, number, *way) for way in ways]

    def statistics(self) -> dict[str, float]:
        return self.client.statistics() if self.state == "ready" else {}

    @property
    def takes_requests(self) -> bool:
        return self.state == "ready" and self.open

    def _handle(self, batch: list[tuple[str, Any]], sent: list[tuple[str, Any]]) -> Job:
        for source, message in batch:
            if isinstance(message, messages.Ping):
                self.pongs.add(message)
            self.client.deliver(source, message)
        yield from self._flush(sent)

    def _flush(self, sent: list[tuple[str, Any]]) -> Job:
        """Send what the client wanted sent; then, while draining, see whether it's done."""
        effects, self._collected = self._collected, []
        yield from self._send(effects, sent)
        if self._draining and not self.client.num_open:
            self._draining = False
            self._tell(supervision.Drained())

    def _forget(self, order: supervision.PeersLost) -> Job:
        self.losses.update(order.lost)
        if order.removed:
            self.client.removed(order.lost)
        else:
            self.client.lost(order.lost, order.error, order.from_outside)
        self._check_parked()
        yield from self._flush([])

    def _regain(self, names: Sequence[str]) -> Job:
        self.client.regained(names)
        self._check_parked()
        yield from self._flush([])

    def _check_parked(self) -> None:
        """Nobody waits while a replica lives, but for a trial."""
        takeover = self.client._takeover
        for handle in self.client._ledger.values():
            if handle.parked and not takeover.blocked and self.client.dead is None:
                assert takeover.on_trial is not None, f"{handle.request_id} waits for nothing"
                assert handle.strikes or handle.blows, f"{handle.request_id} waits for others"

    def _obey_more(self, order: Any) -> Job:
        match order:
            case supervision.TopologyReady():
                self.open = True
                self._tell(supervision.Listening(f"http://{self.name}"))
            case supervision.BeginDrain(timeout=timeout):
                self._drain(timeout)
            case supervision.PeersLeaving(names=names):
                self.client.leave(names, lambda: self._tell(supervision.PeersLeft()))
            case supervision.TopologyFailed(error=error, traceback=traceback):
                self.client.fail_all(EngineDeadError(error, traceback))
                self._drain(1.0)
            case _:
                assert callable(order), f"{self.name} was told {order!r}"
                order()
        yield from self._flush([])

    def _drain(self, timeout: float) -> None:
        self.client.draining = self._draining = True
        error = EngineDeadError("the server is shutting down")
        late: Callable[[], None] = lambda: self._draining and self.client.fail_all(error)  # noqa: E731
        self.world.clock.after(timeout, self.order, late)


def make_node(world: World, name: str, generation: int) -> Node:
    kinds: dict[str, type[Node]] = {"client": ClientNode, "worker": WorkerNode}
    return kinds.get(name.partition(".")[0], CoreNode)(world, name, generation)
