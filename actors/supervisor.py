"""The supervisor: starts every actor of a topology, sees their deaths, and ends them together.

It has one thread (an actor's PR_SET_PDEATHSIG fires when the thread that started it ends) and makes
no decisions of its own: they are in `lifecycle.py`. What it holds: per actor a process (watched
through a pidfd) and a control connection; per channel the segment and bells, which it made before
the actors and keeps for later incarnations. Whom it tells: a Reporter.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import msgspec

from ..mq import messages
from ..mq.config import EngineConfig, ModelSpec, ServerConfig
from ..mq.endpoint import ChannelOwner, Endpoint
from ..mq.segment import reap
from . import lifecycle, topology
from .boot import Boot, memory_fd
from .control import Control
from .lifecycle import Lifecycle, State
from .linux import describe_exit, usage


class Reporter(Protocol):
    """Whoever is told how it goes: a terminal, or the process of an `LLM`."""

    def progress(self, actor: str, progress: messages.Progress) -> None: ...

    def serving(self, details: dict[str, str | int | float], addresses: list[str]) -> None: ...

    def draining(self, timeout: float) -> None: ...

    def failed(self, death: lifecycle.TellDeath) -> None: ...


class Child:
    """One actor's process."""

    def __init__(self, name: str, process: subprocess.Popen[bytes], control: Control) -> None:
        self.name = name
        self.process = process
        self.control = control
        self.pidfd = os.pidfd_open(process.pid)
        self.state = "starting"
        self.last_words: messages.ActorFailed | None = None


class Supervisor:
    """Runs one topology from start to end.

    external: the control connection of a client that is not a child (see `connection.py`); without
    one, an API server is started for `server` and accepts on `listener`.
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
    ) -> None:
        self._engine = engine
        self._spec = spec
        self._reporter = reporter
        self._server = server
        self._listener = listener
        self._external = external
        self._counts: dict[str, int] = {}
        self._children: dict[str, Child] = {}
        self._owners: list[ChannelOwner] = []
        self._details: dict[str, str | int | float] = {}
        self._statistics: dict[str, dict[str, float]] = {}
        self._addresses: list[str] = []

    async def run(self) -> int:
        """Start everything, serve until told to stop or until an actor dies, end everything.

        Returns the exit code.
        """
        self._loop = asyncio.get_running_loop()
        self._exit: asyncio.Future[int] = self._loop.create_future()
        self._loop.set_exception_handler(self._on_broken_callback)
        self._folder = tempfile.mkdtemp(prefix="ringcast-")
        names = topology.instances(self._counts)
        clients = [name for name in names if name.startswith("client.")]
        if self._external is not None:
            names = [name for name in names if name not in clients]
        self._life = Lifecycle(
            names, clients, self._engine.shutdown_timeout if self._server else 0.0
        )
        self._loop.add_signal_handler(signal.SIGTERM, self._on_signal)
        # Ctrl-C reaches the process of an `LLM` too, and there it's that process that decides what
        # it means.
        self._loop.add_signal_handler(
            signal.SIGINT, self._on_signal if self._server else lambda: None
        )
        startup = self._loop.call_later(self._engine.startup_timeout, self._startup_timed_out)
        try:
            self._make_channels()
            for name in names:
                self._start(name)
            if self._external is not None:
                self._attach_external(self._external, clients[0])
            return await self._exit
        finally:
            startup.cancel()
            for number in (signal.SIGINT, signal.SIGTERM):
                self._loop.remove_signal_handler(number)
            self._clean_up()

    # Starting

    def _make_channels(self) -> None:
        reap()
        for channel in topology.channels(self._counts):
            owner = ChannelOwner.create(
                transport=self._engine.transport,
                name=channel.name,
                writer=channel.writer,
                readers=channel.readers,
                messages=channel.messages,
                ring_bytes=self._engine.ring_bytes,
                folder=self._folder,
            )
            self._owners.append(owner)

    def _endpoints(self, name: str) -> tuple[list[Endpoint], list[int]]:
        """An actor's ends of its channels, and all descriptors that they need."""
        endpoints = [owner.endpoint(name) for owner in self._owners_of(name)]
        return endpoints, [fd for endpoint in endpoints for fd in endpoint.fds]

    def _owners_of(self, name: str) -> list[ChannelOwner]:
        return [owner for owner in self._owners if name in (owner.writer, *owner.readers)]

    def _start(self, name: str) -> None:
        ours, theirs = Control.pair()
        endpoints, fds = self._endpoints(name)
        kind = name.partition(".")[0]
        listen_fd = (
            self._listener.fileno() if self._listener is not None and kind == "client" else -1
        )
        boot = Boot(
            actor=name,
            target=topology.target(kind),
            parent_pid=os.getpid(),
            control_fd=theirs.fileno(),
            engine=self._engine,
            spec=self._spec,
            endpoints=endpoints,
            counts=self._counts,
            server=self._server,
            listen_fd=listen_fd,
        )
        boot_fd = memory_fd(msgspec.msgpack.encode(boot))
        inherited = {boot_fd, theirs.fileno(), *fds, *([listen_fd] if listen_fd >= 0 else [])}
        command = [sys.executable, "-P", "-m", "ringcast.actors.boot", str(boot_fd)]
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=inherited)
        os.close(boot_fd)
        theirs.close()
        child = Child(name, process, Control(ours, messages.ActorToSupervisor))
        self._children[name] = child
        self._loop.add_reader(child.pidfd, self._on_death, child)
        self._loop.add_reader(child.control.fileno(), self._on_control, child)

    def _attach_external(self, control: Control, name: str) -> None:
        endpoints, fds = self._endpoints(name)
        control.send(messages.Attach(msgspec.msgpack.encode(endpoints)), fds)
        self._loop.add_reader(control.fileno(), self._on_external, control, name)

    # Events

    def _on_signal(self) -> None:
        self._apply(self._life.stop())

    def _startup_timed_out(self) -> None:
        if self._life.state is not State.STARTING:
            return
        waiting = [child.name for child in self._children.values() if child.state == "starting"]
        seconds = self._engine.startup_timeout
        error = f"not ready after {seconds:g} s (--startup-timeout): {', '.join(waiting)}"
        self._apply(self._life.died(waiting[0], error))
        self._children[waiting[0]].process.kill()

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
            case messages.Progress():
                self._reporter.progress(name, message)
            case messages.ActorReady(details=details):
                if child is not None:
                    child.state = "ready"
                self._details |= details
                self._apply(self._life.ready(name))
            case messages.Listening(address=address):
                self._addresses.append(address)
                self._apply(self._life.listening(name))
            case messages.Drained():
                self._apply(self._life.drained(name))
            case messages.Statistics(values=values):
                self._statistics[name] = values
            case messages.StatusRequest():
                control.send(self._status())
            case messages.ActorFailed():
                if child is not None:
                    child.last_words = message

    def _on_death(self, child: Child) -> None:
        self._loop.remove_reader(child.pidfd)
        os.close(child.pidfd)
        self._on_control(child)  # its last words may still lie in the socket
        self._loop.remove_reader(child.control.fileno())
        child.control.close()
        status = child.process.wait()
        child.state = "dead"
        for owner in self._owners_of(child.name):
            owner.mark_dead(child.name)
        words = child.last_words
        error = f"{child.name} (pid {child.process.pid}) died: {describe_exit(status)}"
        if words is not None:
            error = words.error if words.user_error else f"{error}: {words.error}"
        self._apply(
            self._life.died(
                child.name,
                error,
                words.traceback if words is not None else "",
                words.user_error if words is not None else False,
            )
        )

    def _on_broken_callback(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """A mistake in this file must end the topology, not leave it half-supervised."""
        if not self._exit.done():
            self._exit.set_exception(context.get("exception") or RuntimeError(context["message"]))

    # Effects

    def _apply(self, effects: Sequence[lifecycle.Effect]) -> None:
        for effect in effects:
            match effect:
                case lifecycle.OpenDoor():
                    self._tell(self._clients(), messages.TopologyReady(self._details))
                case lifecycle.Announce():
                    self._reporter.serving(self._details, self._addresses)
                case lifecycle.TellDeath():
                    self._reporter.failed(effect)
                    died = messages.PeerDied(
                        effect.actor, effect.error, effect.traceback, effect.user_error
                    )
                    self._tell(self._clients(), died)
                case lifecycle.Drain(timeout=timeout):
                    self._reporter.draining(timeout)
                    self._tell(self._clients(), messages.BeginDrain(timeout))
                case lifecycle.StopAll():
                    for child in self._alive():
                        if child.state == "starting":
                            child.process.kill()  # it may not listen yet, and loses nothing
                        else:
                            child.control.send(messages.Shutdown())
                case lifecycle.KillAll():
                    for child in self._alive():
                        child.process.kill()
                case lifecycle.Deadline(seconds=seconds, generation=generation):
                    self._loop.call_later(seconds, self._on_deadline, generation)
                case lifecycle.Exit(code=code):
                    if not self._exit.done():
                        self._exit.set_result(code)

    def _on_deadline(self, generation: int) -> None:
        self._apply(self._life.deadline_passed(generation))

    def _tell(self, controls: Iterable[Control], message: messages.Message) -> None:
        for control in controls:
            control.send(message)

    def _alive(self) -> list[Child]:
        return [child for child in self._children.values() if child.state != "dead"]

    def _clients(self) -> list[Control]:
        inside = [child.control for child in self._alive() if child.name.startswith("client.")]
        return [*inside, self._external] if self._external is not None else inside

    def _status(self) -> messages.Status:
        actors = []
        for child in self._children.values():
            cpu, rss = usage(child.process.pid)
            actors.append(
                messages.ActorStatus(child.name, child.process.pid, child.state, cpu, rss, 0)
            )
        edges = []
        for owner in self._owners:
            stats = owner.stats()
            edges.append(messages.EdgeStatus(owner.name, stats.capacity, stats.used, stats.records))
        statistics = {
            f"{actor}.{key}": v
            for actor, values in self._statistics.items()
            for key, v in values.items()
        }
        return messages.Status(actors, edges, statistics)

    def _clean_up(self) -> None:
        for child in self._alive():  # only after an exception of our own
            child.process.kill()
            child.process.wait()
        for owner in self._owners:
            owner.close()
        shutil.rmtree(self._folder, ignore_errors=True)
