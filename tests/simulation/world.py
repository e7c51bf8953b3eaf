"""One run of a simulated topology, from its start to its exit, and what must hold after it.

    start    all nodes become ready and the door opens; users come, faults happen
    rest     all users have their answers, all that died is back: nothing may be left anywhere
    ping     each client's ping goes through all actors
    stop     drained, and exit 0

A seed whose topology is stopped early, or fails because something died too often, skips the middle.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import random
import tempfile
import types
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple
from unittest import mock

from tiny_model import make_tiny_model

from ringcast.actors import topology
from ringcast.actors.lifecycle import State
from ringcast.actors.text.text_tokenizer import TextTokenizer, load_tokenizer

from .client_node import ClientNode
from .clock import Clock, Trace
from .core_nodes import CoreNode
from .network import Network
from .node import Node
from .scenario import Fault, Scale, draw
from .supervisor import Supervisor
from .users import User
from .wire import Wire
from .worker_node import WorkerNode

MOST_SECONDS = 300.0  # of virtual time until all is at rest
MOST_EVENTS = 200_000
_COUNTED = (
    "preemptions",
    "forks",
    "prefix_cache_hits",
    "chunked_prefills",
    "overshoot_tokens",
    "takeovers",
    "poisoned",
)
_RETRY = 0.05  # seconds between two tries of a scale
_LOOK = 0.5  # seconds between looks whether all is at rest


class Result(NamedTuple):
    """What a seed has come to. digest: of the whole trace. counts: users by their state at the end,
    deaths, and what the actors counted.
    """

    digest: str
    profile: str
    num_events: int
    seconds: float
    counts: dict[str, int]


@functools.cache
def small_tokenizer() -> TextTokenizer:
    with tempfile.TemporaryDirectory() as folder:
        return load_tokenizer(str(make_tiny_model(Path(folder))))


class World:
    def __init__(self, seed: int, show: Callable[[str], None] | None = None) -> None:
        self.tokenizer = small_tokenizer()
        self.scenario = draw(seed)
        self.rng = random.Random(f"{seed} run")
        self.clock = Clock()
        self.trace = Trace(self.clock, show)
        self.graph = self.scenario.counts  # as it is now
        self.network = Network(self.graph, self.scenario.capacity, self.wake)
        self.wire = Wire(self)
        self.users = [User(self, i, wish) for i, wish in enumerate(self.scenario.wishes)]
        self.by_request: dict[str, User] = {}
        self.counts: Counter[str] = Counter()
        self.num_other_deaths = 0  # not of poison, nor asked for by the lifecycle
        self._num_scales = 0  # that have ended
        self._due: dict[str, int] = {}  # by actor: steps until it dies
        self._stopping = False
        self._answered = False
        self.supervisor = Supervisor(self)

    # What happens

    def run(self) -> Result:
        try:
            with self._no_chance():
                self.supervisor.begin()
                while self.supervisor.exit_code is None:
                    assert self.clock.now < MOST_SECONDS, self._who_waits()
                    assert self.clock.num_events < MOST_EVENTS, "it goes on and on"
                    assert self.clock.step(), self._who_waits()
            self._check_end()
        finally:
            for node in self.supervisor.nodes.values():
                node.close()
            self.network.close()
        states = [user.state for user in self.users]
        self.counts.update(states)
        return Result(
            self.trace.digest(),
            self.scenario.profile,
            self.clock.num_events,
            self.clock.now,
            dict(sorted(self.counts.items())),
        )

    def delay(self, mean: float) -> float:
        """Mostly about so many seconds, and now and then a lot more."""
        chance = self.rng.random()
        return mean * (2.0 * chance if chance < 0.98 else 50.0 * self.rng.random())

    def wake(self, names: Iterable[str]) -> None:
        for name in names:
            node = self.supervisor.nodes.get(name)
            if node is not None:
                node.wake()

    def serving(self) -> None:
        """The door is open."""
        for user in self.users:
            self.clock.after(user.wish.at, user.come)
        for fault in self.scenario.faults:
            self.clock.after(fault.at, self._strike, fault)
        for scale in self.scenario.scales:
            self.clock.after(scale.at, self._scale, scale)
        if self.scenario.stop_at is not None:
            self.clock.after(self.scenario.stop_at, self._stop)
        else:
            self.clock.after(_LOOK, self._look)

    def instances(self, kind: str) -> list[str]:
        """All of a kind, as the topology is now."""
        return [f"{kind}.{i}" for i in range(topology.count_of(kind, self.graph))]

    def count(self, actors: Iterable[str], step: int) -> None:
        """These are part of the topology, or are no more."""
        graph = Counter(self.graph)
        for name in actors:
            graph[name.partition(".")[0]] += step
        self.graph = dict(graph)

    def scaled(self, replicas: int, error: str) -> None:
        self._num_scales += 1
        self.counts["scales"] += 1
        self.counts["scales taken back"] += bool(error)
        self.trace.note(f"the scale has ended: {replicas} {error}")
        if not self._stopping and not self.supervisor.failed:
            assert replicas == topology.num_engines(self.graph)

    def _scale(self, scale: Scale) -> None:
        over = self._stopping or self.supervisor.failed
        if not over and not self.supervisor.scale(scale.replicas, scale.drain_seconds):
            gone = self.supervisor.life.scaling_to == 0  # none would be left
            self._num_scales += gone
            if not gone:
                self.clock.after(_RETRY, self._scale, scale)

    def restarted(self, node: Node) -> None:
        """A new incarnation starts, and may die of that, or others with it."""
        chance = self.rng.random()
        if self.num_other_deaths < 8 and chance < self.scenario.restart_faults:
            name = node.name if chance < self.scenario.restart_faults / 2 else self._any_actor()
            self.clock.after(self.rng.random() * 0.4, self._strike, Fault("kill", name, 0.0))

    def strikes(self, node: Node) -> bool:
        """Whether a fault kills this node here, before its next step."""
        left = self._due.get(node.name)
        if left is None:
            return False
        self._due[node.name] = left - 1
        if left > 0:
            return False
        del self._due[node.name]
        self.num_other_deaths += 1
        node.die("killed by a fault")
        return True

    def died(self, node: Node, why: str) -> None:
        self.counts["deaths"] += 1
        statistics = node.statistics()
        self.counts.update({name: int(statistics.get(name, 0)) for name in _COUNTED})
        self.trace.note(f"{node.name} dies: {why}")
        if isinstance(node, WorkerNode):
            for request_id in node.killers:
                self.by_request[request_id].num_kills += 1
        if isinstance(node, ClientNode):
            for user in self.users:
                user.client_died(node)
        self.supervisor.died(node, why)

    @property
    def num_poisonous(self) -> int:
        return sum(user.wish.poison is not None for user in self.users)

    @property
    def may_fail(self) -> bool:
        """Whether a user may be told that the engine is dead."""
        return self.supervisor.failed or self.scenario.stop_at is not None

    def _strike(self, fault: Fault) -> None:
        self.trace.note(f"{fault}")
        node = self.supervisor.nodes.get(fault.actor)
        if self._stopping or node is None or node.state == "dead":
            return
        if fault.kind == "kill":
            self._due[fault.actor] = fault.steps
            node.wake()
        else:
            node.stalled_until = self.clock.now + fault.seconds  # for ever, if it hangs

    def _any_actor(self) -> str:
        return self.rng.choice(sorted(self.supervisor.nodes))

    def _stop(self) -> None:
        self._stopping = True
        self.supervisor.stop()

    # At rest

    def _look(self) -> None:
        """When nothing is left to do: ping, and then stop."""
        self.clock.after(_LOOK, self._look)
        if self.supervisor.failed or self._stopping or not self._at_rest():
            return
        self._check_rest()
        unheard = [c for c in self._clients() if not c.pongs.issuperset(c.pings(1))]
        for client in unheard:  # again if a ping met a death
            client.order(functools.partial(client.ping, 1))
        if not unheard:
            self._answered = True
            self._stop()

    def _at_rest(self) -> bool:
        if self.clock.now < self._last_fault or not all(user.done for user in self.users):
            return False
        if self._num_scales < len(self.scenario.scales):
            return False
        self._due.clear()  # who has nothing to do takes no step any more
        gone = self.supervisor.life.given_up
        everyone = [node for name, node in self.supervisor.nodes.items() if name not in gone]
        return (
            self.supervisor.life.state is State.SERVING
            # Who hangs with nothing to read is noticed when the ping comes.
            and all(node.idle or node.stalled_until == math.inf for node in everyone)
            and not self.network.unread(gone)
        )

    @property
    def _last_fault(self) -> float:
        return max((fault.at for fault in self.scenario.faults), default=0.0)

    def _clients(self) -> list[ClientNode]:
        return [n for n in self.supervisor.nodes.values() if isinstance(n, ClientNode)]

    def _who_waits(self) -> str:
        waiting = [f"user {user.number} ({user.state})" for user in self.users if not user.done]
        states = {n.name: n.state for n in self.supervisor.nodes.values() if not n.idle}
        return f"stuck: {waiting}; not idle: {states}; unread: {self.network.unread()}"

    # What must hold

    def _check_rest(self) -> None:
        """Nothing is left of any request, anywhere."""
        for node in self.supervisor.nodes.values():
            if node.state == "dead":
                assert node.name in self.supervisor.life.given_up
            elif isinstance(node, CoreNode):
                statistics = node.core.statistics()
                if node.name.startswith("scheduler."):
                    node.core.check()
                    assert not statistics["running"], statistics
                    assert not statistics["waiting"], statistics
                    assert statistics["free_blocks"] == statistics["num_blocks"] - 1, statistics
                elif node.name.startswith("detokenizer."):
                    assert not statistics["streams"], statistics
            elif isinstance(node, ClientNode):
                statistics = node.client.statistics()
                assert not statistics["open"], statistics
                assert not statistics["parked"], statistics
                assert node.client._takeover.on_trial is None
                text = node.client._text
                assert not any(text.tokenizers._own + text.detokenizers._own)
                # Where it is tight an Accepted may wait for longer than its request lives.
                moved = bool(self.scenario.scales)
                if self.scenario.profile == "calm" and not moved and self.scenario.capacity > 1000:
                    assert not statistics["dropped"], statistics

    def _check_end(self) -> None:
        assert self.supervisor.exit_code == (1 if self.supervisor.failed else 0)
        assert all(node.reaped for node in self.supervisor.nodes.values())
        if self.supervisor.failed:
            assert self.scenario.config.max_restarts == 1, "it gave up too early"
        elif self.scenario.stop_at is None:
            assert self._answered
        for user in self.users:
            if self.may_fail and user.state == "waiting":
                user.state = "refused"
            user.check()

    @contextlib.contextmanager
    def _no_chance(self) -> Iterator[None]:
        """Names and times in shipped code come from this run, and nobody sleeps."""
        numbers = itertools.count()
        time = types.SimpleNamespace(
            monotonic=lambda: self.clock.now,
            perf_counter=lambda: self.clock.now,
            sleep=lambda seconds: None,
        )
        uuid = types.SimpleNamespace(
            uuid4=lambda: types.SimpleNamespace(hex=f"{next(numbers):08x}", int=0)
        )
        with (
            mock.patch.multiple("ringcast.frontend.client", uuid=uuid, time=time),
            mock.patch("ringcast.executor.fake_runner.time", time),
        ):
            yield


def run(seed: int, show: Callable[[str], None] | None = None) -> Result:
    return World(seed, show).run()


def profile(seed: int) -> str:
    return draw(seed).profile
