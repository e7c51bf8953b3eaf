"""The supervisor: starts every actor of a topology, sees their deaths, and restarts or ends them.

It has one thread (an actor's PR_SET_PDEATHSIG fires when the thread that started it ends) and makes
no decisions of its own: they are in lifecycle.py, and who hangs is in stalls.py. What it holds: per
actor a process (watched through a pidfd) and a control connection; per channel the segment and
bells, which it made before the actors and keeps for later incarnations. Whom it tells: a Reporter.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from ..mq import messages, supervision
from ..mq.cluster_config import ClusterPlace
from ..mq.config import EngineConfig, ModelSpec
from ..mq.errors import ConfigError
from ..mq.server_config import ServerConfig
from ..mq.tallies import Shape, Tallies
from . import effects as fx
from . import hosts, topology
from .boot import Boot
from .channel_owners import ChannelOwners
from .child import Child
from .control import Control
from .elastic import ElasticLifecycle
from .linux import allow_many_files, oom_kills
from .profiling import Profiling
from .reporter import Reporter
from .scaling import Scaling, new_units
from .stalls import Position, StallWatch
from .status import status_of


class Supervisor:
    """Runs one topology from start to end.

    external: the control connection of a client that is not a child (see `connection.py`); without
    one, API servers are started for `server`, and all accept on `listener`. cluster: this host's
    place among several; a headless one has neither client nor server.
    """

    def __init__(
        self,
        engine: EngineConfig,
        spec: ModelSpec,
        reporter: Reporter,
        *,
        server: ServerConfig | None = None,
        listener: socket.socket | None = None,
        external: Control | None = None,
        cluster: ClusterPlace | None = None,
    ) -> None:
        self._engine = engine
        self._spec = spec
        self._reporter = reporter
        self._server = server
        self._listener = listener
        self._external = external
        self._cluster = cluster
        self._counts = hosts.counts_on(topology.counts_of(engine, server), cluster)
        self._part = hosts.part_of(self._counts, cluster)
        self._children: dict[str, Child] = {}
        self._tallies = Tallies.create(Shape.of(server)) if server is not None else None
        self._channels = ChannelOwners(engine)
        self._details: dict[str, str | int | float] = {}
        self._addresses: dict[str, str] = {}
        self._statistics: dict[str, dict[str, float]] = {}
        self._restarts: dict[str, int] = {}
        self._lost_at: dict[tuple[str, ...], float] = {}
        self._num_deaths = 0  # that were reported
        self._own_statistics: dict[str, float] = {}
        self._profiling = Profiling()
        self._scaling = Scaling(engine, cluster is not None)
        self._stalls = StallWatch(engine.step_timeout)
        self._oom_kills = oom_kills()  # at the last tick

    async def run(self) -> int:
        """Start everything, serve until told to stop or until a death is final, end everything.

        Returns the exit code.
        """
        self._loop = asyncio.get_running_loop()
        self._exit: asyncio.Future[int] = self._loop.create_future()
        self._loop.set_exception_handler(self._on_broken_callback)
        self._life = self._make_lifecycle()
        self._loop.add_signal_handler(signal.SIGTERM, self._on_signal)
        # Ctrl-C reaches the process of an `LLM` too, and there it's that process that decides what
        # it means.
        self._loop.add_signal_handler(
            signal.SIGINT, self._on_signal if self._external is None else lambda: None
        )
        try:
            allow_many_files()  # replicas may come later
            self._channels.prepare()
            self._channels.make(self._part.channels)
            self._apply(self._life.begin(time.monotonic()))
            if self._external is not None:
                self._attach_external(self._external, self._external_name)
            self._watch_stalls()
            return await self._exit
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                self._loop.remove_signal_handler(number)
            self._clean_up()

    def cannot_launch(self, error: str, user_error: bool) -> None:
        """Replicas of other hosts can't be started, ever. For while `run` does."""
        self._apply(self._life.cannot_launch(error, user_error))

    # Starting

    def _make_lifecycle(self) -> ElasticLifecycle:
        clients = self._part.clients
        external = clients[:1] if self._external is not None else ()
        self._external_name = "".join(external)
        return ElasticLifecycle(
            {
                unit: actors
                for unit, actors in self._part.units.items()
                if not set(actors) & set(external)
            },
            clients,
            external=external,
            remote=self._part.remote,
            patient=self._part.patient,
            shutdown_timeout=0.0 if self._external is not None else self._engine.shutdown_timeout,
            max_restarts=self._engine.max_restarts,
            startup_timeout=self._engine.startup_timeout,
            step_timeout=self._engine.step_timeout,
        )

    def _start(self, names: Sequence[str]) -> None:
        again = [name for name in names if name in self._children]
        for name in again:
            self._restarts[name] = self._restarts.get(name, 0) + 1
        self._channels.revive(again)
        if self._cluster is not None and any(name.startswith("mirror.") for name in names):
            self._cluster = self._cluster.next_session()
        groups: dict[int | None, int] = {}
        failed: dict[str, OSError] = {}
        for name in names:
            group = topology.group_of(name, self._counts)
            try:
                if group not in groups:
                    groups[group] = os.memfd_create("ringcast-ranks")
                self._spawn(name, groups[group])
            except OSError as error:  # no descriptors, processes or memory are left
                failed[name] = error
        for group_fd in groups.values():
            os.close(group_fd)
        for name, why in failed.items():
            what = f"{name} can't be started: {why}"
            self._apply(self._life.died(name, what, from_outside=True, now=time.monotonic()))

    def _spawn(self, name: str, group_fd: int) -> None:
        endpoints, fds = self._channels.endpoints(name)
        kind = name.partition(".")[0]
        listen_fd = tallies_fd = -1
        engine = self._engine
        if kind == "worker":
            engine = hosts.engine_of_workers(engine, self._counts, self._cluster)
        shares = hosts.shares_memory(name, engine, self._cluster)
        fds += [group_fd] if shares else []
        if self._listener is not None and self._tallies is not None and kind == "client":
            listen_fd, tallies_fd = self._listener.fileno(), self._tallies.fd
            fds += [listen_fd, tallies_fd]

        def boot(control_fd: int) -> Boot:
            return Boot(
                actor=name,
                target=self._part.target(name),
                parent_pid=os.getpid(),
                control_fd=control_fd,
                engine=engine,
                spec=self._spec,
                endpoints=endpoints,
                counts=self._counts,
                group_fd=group_fd if shares else -1,
                server=self._server,
                listen_fd=listen_fd,
                tallies_fd=tallies_fd,
                cluster=self._cluster,
            )

        child = Child.spawn(boot, fds)
        self._children[name] = child
        self._loop.add_reader(child.pidfd, self._on_death, child)
        self._loop.add_reader(child.control.fileno(), self._on_control, child)

    def _attach_external(self, control: Control, name: str) -> None:
        endpoints, fds = self._channels.endpoints(name)
        control.send(supervision.Attach(msgspec.msgpack.encode(endpoints)), fds)
        self._loop.add_reader(control.fileno(), self._on_external, control, name)

    # Events

    def _on_signal(self) -> None:
        self._apply(self._life.stop())

    def _on_control(self, child: Child) -> None:
        try:
            while (packet := child.control.receive()) is not None:
                self._on_message(child.name, child.control, packet[0])
        except EOFError:
            self._loop.remove_reader(child.control.fileno())

    def _on_external(self, control: Control, name: str) -> None:
        try:
            while (packet := control.receive()) is not None:
                self._on_message(name, control, packet[0])
        except EOFError:
            self._loop.remove_reader(control.fileno())
            self._apply(self._life.drained(name))
            self._apply(self._life.stop())

    def _on_message(self, name: str, control: Control, message: Any) -> None:
        child = self._children.get(name)
        match message:
            case supervision.Progress():
                self._reporter.progress(name, message)
            case supervision.Notice(text=text):
                self._reporter.notice(text)
            case supervision.ActorReady(details=details):
                if child is not None:
                    child.state = "ready"
                self._details |= details
                self._apply(self._life.ready(name, time.monotonic()))
            case supervision.Listening(address=address):
                self._addresses[name] = address
                self._apply(self._life.listening(name))
            case supervision.Drained():
                self._apply(self._life.drained(name))
            case supervision.PeersForgotten(death=death):
                self._apply(self._life.forgotten(name, death))
            case supervision.Statistics(values=values):
                self._statistics[name] = values
                if (gateway := self._part.gateways.get(name)) is not None:
                    self._tell([gateway], message)
            case supervision.StatusRequest():
                control.send(self._status())
            case supervision.Profile():
                self._say(self._profiling.ask(name, message, self._ready_workers()))
            case supervision.Profiled():
                self._say(self._profiling.answered(name, message))
            case supervision.Scale():
                self._scale(name, message)
            case supervision.PeersLeft():
                self._apply(self._life.left(name))
            case supervision.ActorFailed():
                if child is not None:
                    child.last_words = message

    def _on_death(self, child: Child) -> None:
        now = time.monotonic()
        self._loop.remove_reader(child.pidfd)
        self._on_control(child)  # its last words may still lie in the socket
        self._loop.remove_reader(child.control.fileno())
        child.reap()
        self._statistics.pop(child.name, None)
        if self._tallies is not None and child.name.startswith("client."):
            self._tallies.clear(int(child.name.partition(".")[2]))
        self._say(self._profiling.lost(child.name))
        error, text, user_error = child.describe_death()
        killed = child.was_killed and oom_kills() == self._oom_kills
        died = self._life.died(
            child.name,
            error,
            text,
            user_error,
            from_outside=killed or child.was_lost,
            exit_code=child.exit_code,
            now=now,
        )
        self._apply(died)

    def _on_timer(self, key: str) -> None:
        self._apply(self._life.timer(key, time.monotonic()))

    def _on_broken_callback(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """A mistake in this file must end the topology, not leave it half-supervised."""
        if not self._exit.done():
            self._exit.set_exception(context.get("exception") or RuntimeError(context["message"]))

    def _watch_stalls(self) -> None:
        self._loop.call_later(self._stalls.tick_seconds, self._watch_stalls)
        self._oom_kills = oom_kills()
        away = {name for names in self._lost_at for name in names}  # they aren't listened to yet
        positions = [
            Position(owner.name, reader, cursor, published)
            for owner in self._channels
            if owner.writer not in away
            for reader, cursor, published in owner.progress()
            if reader in self._children and self._children[reader].state == "ready"
        ]
        stalls = self._stalls.tick(positions)
        for stall in stalls:
            # Ranks wait for the one that hangs: from here they look alike.
            readers = [other.reader for other in stalls if other.channel == stall.channel]
            names = " or ".join(f"{name} (pid {self._children[name].pid})" for name in readers)
            owner = self._channels.named(stall.channel)
            self._children[stall.reader].kill(
                f"{names} hangs: it has read nothing for "
                f"{stall.seconds:.1f} s (--step-timeout {self._engine.step_timeout:g}) from "
                f"{owner.describe()}"
            )

    # Effects

    def _apply(self, effects: Sequence[fx.Effect]) -> None:
        for effect in effects:
            match effect:
                case fx.Start(actors=actors):
                    self._start(actors)
                case fx.Kill(actors=actors):
                    for child in self._alive(actors):
                        child.kill()
                case fx.MarkDead(actors=actors):
                    self._channels.mark_dead(actors)
                case fx.TellLost():
                    self._lost(effect)
                case fx.TellBack():
                    self._back(effect)
                case fx.Timer(seconds=seconds, key=key):
                    self._loop.call_later(seconds, self._on_timer, key)
                case _:
                    self._apply_to_all(effect)

    def _apply_to_all(self, effect: fx.Effect) -> None:
        """What concerns the topology as a whole."""
        match effect:
            case fx.OpenDoor(clients=clients):
                self._tell(clients, supervision.TopologyReady(self._details))
            case fx.Announce():
                addresses = list(dict.fromkeys(self._addresses.values()))  # API servers share one
                self._reporter.serving(self._details, addresses)
            case fx.Drain(timeout=timeout):
                self._reporter.draining(timeout)
                self._tell(self._clients(), supervision.BeginDrain(timeout))
            case fx.TellFailed(actor=actor, error=error, traceback=text, user_error=user_error):
                self._reporter.failed(effect)
                failed = supervision.TopologyFailed(actor, error, text, user_error)
                self._tell(self._clients(), failed)
            case fx.StopAll():
                self._stop(self._alive())
            case fx.KillAll():
                for child in self._alive():
                    child.kill()
            case fx.Exit(code=code):
                if not self._exit.done():
                    self._exit.set_result(code)
            case _:
                self._apply_to_scale(effect)

    def _apply_to_scale(self, effect: fx.Effect) -> None:
        match effect:
            case fx.Connect(actors=actors):
                self._connect(actors)
            case fx.TellAdded(to=to, number=number, added=added):
                for name in to:
                    endpoints, fds = self._channels.endpoints(name, added)
                    encoded = msgspec.msgpack.encode(endpoints)
                    told = supervision.PeersAdded(number, list(added), encoded)
                    self._children[name].control.send(told, fds)
            case fx.TellLeaving(to=to, names=names):
                self._tell(to, supervision.PeersLeaving(list(names)))
            case fx.Stop(actors=actors):
                self._stop(self._alive(actors))
            case fx.Disconnect(actors=actors):
                self._count(actors, -1)
                self._channels.drop(actors)
                for name in actors:
                    self._children.pop(name, None)
                    self._restarts.pop(name, None)
            case fx.ScaleEnded(replicas=replicas, error=error):
                self._reporter.notice(f"replicas: {replicas}" + (f" ({error})" if error else ""))
                self._say(self._scaling.end(replicas, error))

    def _scale(self, client: str, asked: supervision.Scale) -> None:
        refusal = self._scaling.refusal(asked.replicas)
        why, status = (refusal, 400) if refusal else self._life.refusal(asked.replicas) or ("", 200)
        if why:
            answer = supervision.Scaled(asked.ask, self._life.num_replicas, why, status)
            self._tell([client], answer)
            return
        self._scaling.begin(client, asked.ask)
        new = new_units(self._counts, asked.replicas)
        seconds = asked.drain_seconds
        self._apply(
            self._life.scale(
                asked.replicas, new, self._engine.shutdown_timeout if seconds < 0 else seconds
            )
        )

    def _connect(self, actors: tuple[str, ...]) -> None:
        self._count(actors, 1)
        try:
            self._channels.make(self._part.channels)
        except ConfigError as error:
            self._channels.drop(actors)
            self._count(actors, -1)
            self._apply(self._life.cannot_connect(str(error)))
        else:
            self._apply(self._life.connected())

    def _count(self, actors: Iterable[str], step: int) -> None:
        counts = dict(self._counts)
        for name in actors:
            kind = name.partition(".")[0]
            counts[kind] = counts.get(kind, 0) + step
        self._counts = counts
        self._part = hosts.part_of(counts, self._cluster)

    def _stop(self, children: Iterable[Child]) -> None:
        for child in children:
            if child.state == "starting":
                child.kill()  # it may not listen yet, and loses nothing
            else:
                child.control.send(supervision.Shutdown())

    def _lost(self, effect: fx.TellLost) -> None:
        lost = supervision.PeersLost(
            effect.death,
            effect.actor,
            effect.error,
            effect.traceback,
            list(effect.lost),
            effect.from_outside,
            effect.removed,
        )
        self._tell(effect.to, lost)
        if effect.death > self._num_deaths:  # not one that somebody is told of later
            self._num_deaths = effect.death
            self._own_statistics["last_death_at"] = now = time.monotonic()
            self._lost_at.setdefault(effect.lost, now)
            self._reporter.lost(effect)

    def _back(self, effect: fx.TellBack) -> None:
        self._tell(effect.to, supervision.PeersBack(list(effect.names)))
        since = self._lost_at.pop(effect.names, None)
        if since is not None:
            now = time.monotonic()
            self._own_statistics |= {"last_return_at": now, "last_return_seconds": now - since}
            self._reporter.back(effect.names, now - since)

    def _tell(self, names: Iterable[str], message: messages.Message) -> None:
        for name in names:
            if name == self._external_name and self._external is not None:
                self._external.send(message)
            elif self._children[name].state == "ready":
                self._children[name].control.send(message)

    def _say(self, sends: Iterable[tuple[str, messages.Message]]) -> None:
        for to, message in sends:
            self._tell([to], message)

    def _ready_workers(self) -> list[str]:
        return [
            name
            for name, child in self._children.items()
            if name.startswith("worker.") and child.state == "ready"
        ]

    def _alive(self, names: Iterable[str] | None = None) -> list[Child]:
        chosen = self._children if names is None else names
        here = [self._children[name] for name in chosen if name in self._children]
        return [child for child in here if child.state != "dead"]

    def _clients(self) -> list[str]:
        inside = [name for name in self._part.clients if name in self._children]
        return [*inside, self._external_name] if self._external_name else inside

    def _status(self) -> supervision.Status:
        """Times among the supervisor's own statistics are `time.monotonic()`."""
        own = {
            **self._own_statistics,
            "deaths": self._num_deaths,
            "replicas": self._life.num_replicas,
            "scaling_to": self._life.scaling_to,
        }
        statistics = {**self._statistics, "supervisor": own}
        return status_of(self._children, self._restarts, self._channels.status(), statistics)

    def _clean_up(self) -> None:
        for child in self._alive():  # only after an exception of our own
            child.kill()
            child.reap()
        self._channels.close()
        if self._tallies is not None:
            self._tallies.close()
