"""The supervisor's shell in the simulation: carries out what the shipped Lifecycle decides.

Mirrored is actors/supervisor.py. Control messages travel late but in order, in each direction of
each connection; a death is reaped after the last words of the dead.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ringcast.actors import effects, topology
from ringcast.actors.elastic import ElasticLifecycle
from ringcast.actors.scaling import new_units
from ringcast.actors.stalls import Position, StallWatch
from ringcast.mq import codec, messages, supervision

from .client_node import ClientNode
from .core_nodes import CoreNode
from .node import Node
from .worker_node import WorkerNode

if TYPE_CHECKING:
    from .world import World

_KINDS: dict[str, type[Node]] = {"client": ClientNode, "worker": WorkerNode}
_CONTROL = 1e-4  # mean seconds of a control message's way
_REAP = 2e-3  # mean seconds until a death is seen
_decode_order: codec.Decoder[Any] = codec.Decoder(supervision.SupervisorToActor)
_decode_report: codec.Decoder[Any] = codec.Decoder(supervision.ActorToSupervisor)


class Supervisor:
    """nodes: the last incarnation of each actor. exit_code: None while anything runs."""

    def __init__(self, world: World) -> None:
        self.exit_code: int | None = None
        self.serving = False
        self.failed = False
        self.nodes: dict[str, Node] = {}
        self._world = world
        self._generations: dict[str, int] = {}
        self._arrivals: dict[tuple[str, str], float] = {}  # the last on each way
        self._units = topology.units(world.scenario.counts)
        self._away: set[str] = set()  # who was lost and isn't back
        config = world.scenario.config
        self._stalls = StallWatch(config.step_timeout)
        self.life = ElasticLifecycle(
            self._units,
            [
                name
                for name in topology.instances(world.scenario.counts)
                if name.startswith("client.")
            ],
            shutdown_timeout=config.shutdown_timeout,
            max_restarts=config.max_restarts,
            startup_timeout=config.startup_timeout,
            step_timeout=config.step_timeout,
        )

    def begin(self) -> None:
        self._apply(self.life.begin(self._world.clock.now))
        self._watch_stalls()

    def stop(self) -> None:
        self._world.trace.note("stop is asked for")
        self._apply(self.life.stop())

    def scale(self, replicas: int, drain_seconds: float) -> bool:
        """Whether it isn't refused."""
        refusal = self.life.refusal(replicas)
        self._world.trace.note(f"a scale to {replicas} is asked for: {refusal}")
        if refusal is None:
            new = new_units(self._world.graph, replicas)
            self._apply(self.life.scale(replicas, new, drain_seconds))
        return refusal is None

    def heard(self, node: Node, message: messages.Message) -> None:
        """A node says something."""
        payload = codec.encode(message)
        self._world.trace.note(f"{node.name} > supervisor", payload, message)
        self._late(node.name, "supervisor", _CONTROL, self._on_message, node, payload)

    def died(self, node: Node, why: str) -> None:
        self._late(node.name, "supervisor", _REAP, self._on_death, node, why)

    def _watch_stalls(self) -> None:
        self._world.clock.after(self._stalls.tick_seconds, self._watch_stalls)
        positions = [
            Position(channel, reader, cursor, published)
            for channel, writer, reader, cursor, published in self._world.network.progress()
            if writer not in self._away
            and reader in self.nodes
            and self.nodes[reader].state == "ready"
        ]
        for stall in self._stalls.tick(positions):
            self._world.num_other_deaths += 1
            self._kill((stall.reader,))

    def _on_message(self, node: Node, payload: bytes) -> None:
        life, now = self.life, self._world.clock.now
        match _decode_report(payload):
            case supervision.ActorReady():
                self._apply(life.ready(node.name, now))
            case supervision.Listening():
                self._apply(life.listening(node.name))
            case supervision.Drained():
                self._apply(life.drained(node.name))
            case supervision.PeersForgotten(death=death):
                self._apply(life.forgotten(node.name, death))
            case supervision.PeersLeft():
                self._apply(life.left(node.name))

    def _on_death(self, node: Node, why: str) -> None:
        self._world.trace.note(f"{node.name} is reaped")
        self.nodes[node.name].reaped = True
        error = f"{node.name} died: {why}"
        from_outside = why == "killed by a fault"
        now = self._world.clock.now
        self._apply(self.life.died(node.name, error, from_outside=from_outside, now=now))

    def _apply(self, todo: Any) -> None:
        world = self._world
        for effect in todo:
            world.trace.note(f"supervisor: {effect}")
            match effect:
                case effects.Start(actors=actors):
                    for name in actors:
                        old = self.nodes.get(name)
                        assert old is None or old.reaped, f"{name} is started while it runs"
                    world.network.revive(actors)
                    for name in actors:
                        self._start(name)
                case effects.Kill(actors=actors):
                    self._kill(actors)
                case effects.MarkDead(actors=actors):
                    for name in actors:
                        world.network.mark_dead(name)
                case effects.TellLost(to, death, actor, error, traceback, lost, from_outside):
                    self._away.update(lost)
                    told = supervision.PeersLost(
                        death, actor, error, traceback, list(lost), from_outside, effect.removed
                    )
                    self._tell(to, told)
                case effects.Connect(actors=actors):
                    world.count(actors, 1)
                    world.network.connect(world.graph)
                    self._apply(self.life.connected())
                case effects.TellAdded(to=to, number=number, added=added):
                    self._tell(to, supervision.PeersAdded(number, list(added), b""))
                case effects.TellLeaving(to=to, names=names):
                    self._tell(to, supervision.PeersLeaving(list(names)))
                case effects.Stop(actors=actors):
                    self._stop(actors)
                case effects.Disconnect(actors=actors):
                    self._disconnect(actors)
                case effects.ScaleEnded(replicas=replicas, error=error):
                    world.scaled(replicas, error)
                case effects.TellBack(to=to, names=names):
                    self._away.difference_update(names)
                    self._tell(to, supervision.PeersBack(list(names)))
                case effects.OpenDoor(clients=clients):
                    self._tell(clients, supervision.TopologyReady())
                case effects.Announce():
                    self.serving = True
                    world.serving()
                case effects.TellFailed(actor, error, traceback, user_error):
                    self.failed = True
                    told_all = supervision.TopologyFailed(actor, error, traceback, user_error)
                    self._tell(self._clients(), told_all)
                case effects.Drain(timeout=timeout):
                    self._tell(self._clients(), supervision.BeginDrain(timeout))
                case effects.StopAll():
                    self._stop_all()
                case effects.KillAll():
                    self._kill(tuple(self.nodes))
                case effects.Timer(seconds=seconds, key=key):
                    world.clock.after(seconds, self._on_timer, key)
                case effects.Exit(code=code):
                    self.exit_code = code
                case _:
                    raise AssertionError(effect)

    def _on_timer(self, key: str) -> None:
        if self.exit_code is None:
            todo = self.life.timer(key, self._world.clock.now)
            self._world.num_other_deaths += any(isinstance(one, effects.Kill) for one in todo)
            self._apply(todo)

    def _start(self, name: str) -> None:
        generation = self._generations[name] = self._generations.get(name, -1) + 1
        kind = _KINDS.get(name.partition(".")[0], CoreNode)
        self.nodes[name] = kind(self._world, name, generation)
        if generation or self.serving:
            self._world.restarted(self.nodes[name])

    def _kill(self, names: tuple[str, ...]) -> None:
        for name in names:
            delay = self._world.delay(self._world.scenario.kill)
            self._world.clock.after(delay, self.nodes[name].die, "killed by signal 9")

    def _disconnect(self, actors: tuple[str, ...]) -> None:
        for name in actors:
            self._away.discard(name)
            old = self.nodes.pop(name, None)
            assert old is None or old.reaped, f"{name} is forgotten while it runs"
        for node in self.nodes.values():
            ends = [box.edge for box in node.outboxes.values()] + [i.edge for i in node.inbounds]
            for edge in ends if node.state != "dead" else ():
                left = {edge.writer, *edge.readers}.isdisjoint(actors)
                assert left, f"{node.name} still has an end of {edge.name}"
        self._world.count(actors, -1)
        self._world.network.disconnect(actors)

    def _stop_all(self) -> None:
        self._stop(tuple(self.nodes))

    def _stop(self, names: tuple[str, ...]) -> None:
        for name in names:
            node = self.nodes[name]
            if node.state == "starting":
                self._kill((name,))
            else:
                self._tell((name,), supervision.Shutdown())

    def _clients(self) -> tuple[str, ...]:
        return tuple(name for name in self.nodes if name.startswith("client."))

    def _tell(self, names: tuple[str, ...], message: messages.Message) -> None:
        payload = codec.encode(message)
        for name in names:
            self._world.trace.note(f"supervisor > {name}", payload, message)
            node = self.nodes[name]
            self._late("supervisor", name, _CONTROL, node.order, _decode_order(payload))

    def _late(self, source: str, to: str, mean: float, call: Any, *args: Any) -> None:
        """Call it later, but not before what was sent this way earlier."""
        clock = self._world.clock
        at = max(self._arrivals.get((source, to), 0.0), clock.now + self._world.delay(mean))
        self._arrivals[source, to] = at
        clock.after(at - clock.now, call, *args)
