"""Several "hosts" on one: namespaces with a network, processes, /dev/shm and a name of their own;
and a cluster of two of them, a master and a headless node.

Needs root, `unshare`, `nsenter` and `ip`; `lacking` says what is missing.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import shutil
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from serving import RINGCAST, Endpoint

MASTER_IP, NODE_IP = "10.77.0.1", "10.77.0.2"
_KINDS = ("--net", "--mount", "--ipc", "--pid", "--uts")
_numbers = itertools.count()
_INSIDE = "mount -t tmpfs tmpfs /dev/shm && hostname {name} && ip link set lo up && echo up && cat"


def lacking() -> str:
    """Why there can be no namespaces here; "" if there can."""
    for tool in ("unshare", "nsenter", "ip"):
        if shutil.which(tool) is None:
            return f"needs `{tool}`"
    script = "ip link add rc-try type veth peer name rc-yrt"
    command = ["unshare", *_KINDS, "--fork", "--mount-proc", "sh", "-c", script]
    tried = subprocess.run(command, capture_output=True, text=True)
    return "" if tried.returncode == 0 else f"namespaces aren't permitted: {tried.stderr.strip()}"


class Host:
    """A host while its context lasts. All that runs on it ends with it, at once."""

    def __init__(self, name: str) -> None:
        self.name = name
        command = ["unshare", *_KINDS, "--fork", "--kill-child", "--mount-proc", "sh", "-c"]
        self._holder = subprocess.Popen(
            [*command, _INSIDE.format(name=name)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._holder.stdout.readline() == "up\n"
        (self.pid,) = _children(self._holder.pid)
        self._programs: list[Program] = []

    def __enter__(self) -> Host:
        return self

    def __exit__(self, *_: object) -> None:
        self._holder.kill()
        self._holder.wait()
        self._holder.stdin.close()
        self._holder.stdout.close()
        for program in self._programs:
            program.wait()

    def command(self, *words: str) -> list[str]:
        return ["nsenter", "-t", str(self.pid), "-n", "-m", "-i", "-p", "-u", "--", *words]

    def do(self, *words: str) -> None:
        subprocess.run(self.command(*words), check=True)

    def start(self, *words: str, **env: str) -> Program:
        program = Program(self.command(*words), env)
        self._programs.append(program)
        return program

    def processes(self) -> Iterator[int]:
        """The process ids here of what runs on it."""
        space = os.readlink(f"/proc/{self.pid}/ns/pid")
        for name in os.listdir("/proc"):
            with contextlib.suppress(OSError):
                if name.isdigit() and os.readlink(f"/proc/{name}/ns/pid") == space:
                    yield int(name)

    def outer_pid(self, inner: int) -> int:
        """The process id here of what has the process id `inner` there."""
        for pid in self.processes():
            with contextlib.suppress(OSError), open(f"/proc/{pid}/status") as status:
                (line,) = (line for line in status if line.startswith("NSpid:"))
                if int(line.split()[-1]) == inner:
                    return pid
        raise AssertionError(f"no process {inner} on {self.name}")


class Program:
    """What runs on a host. said: its stderr so far."""

    def __init__(self, command: list[str], env: dict[str, str]) -> None:
        self.said = ""
        self._process = subprocess.Popen(
            command, stderr=subprocess.PIPE, text=True, env={**os.environ, **env}
        )
        self._changed = threading.Condition()
        self._ended = False
        self._listening = threading.Thread(target=self._listen)
        self._listening.start()

    def _listen(self) -> None:
        for line in self._process.stderr:
            with self._changed:
                self.said += line
                self._changed.notify_all()
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def until_said(self, text: str, times: int = 1, seconds: float = 40.0) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self.said.count(text) >= times or self._ended, seconds)
        assert self.said.count(text) >= times, f"{text!r} was not said: {self.said}"

    def signal(self, number: int) -> None:
        for pid in _children(self._process.pid):  # nsenter itself passes nothing on
            os.kill(pid, number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self.wait()

    def wait(self, seconds: float = 30.0) -> int:
        """The exit status."""
        status = self._process.wait(seconds)
        self._listening.join(seconds)
        self._process.stderr.close()
        return status


@contextlib.contextmanager
def cable(one: Host | None, one_address: str, other: Host, other_address: str) -> Iterator[str]:
    """Connect two hosts; None is the one that the tests run on. Yields the name of the first end.

    It goes with its hosts, or when the context ends.
    """
    number = next(_numbers)
    ends = [(f"rc{os.getpid()}a{number}", one, one_address)]
    ends.append((f"rc{os.getpid()}b{number}", other, other_address))
    names = [name for name, _, _ in ends]
    subprocess.run(
        ["ip", "link", "add", names[0], "type", "veth", "peer", "name", names[1]], check=True
    )
    try:
        for name, host, address in ends:
            inside = [] if host is None else host.command()
            if host is not None:
                subprocess.run(["ip", "link", "set", name, "netns", str(host.pid)], check=True)
            subprocess.run([*inside, "ip", "addr", "add", f"{address}/30", "dev", name], check=True)
            subprocess.run([*inside, "ip", "link", "set", name, "up"], check=True)
        yield names[0]
    finally:
        if one is None:
            subprocess.run(["ip", "link", "del", names[0]], check=True)


class Cluster(Endpoint):
    """Two hosts, the cable between them, and what is started on them. url: the master's, from here.

    options: of `ringcast serve` on both; of_master and of_node: those that either has besides.
    """

    def __init__(
        self,
        folder: Path,
        model: Path,
        options: tuple[str, ...],
        of_master: tuple[str, ...] = (),
        of_node: tuple[str, ...] = (),
        **env: str,
    ) -> None:
        super().__init__("")
        self.folder, self.model = folder, model
        self._options, self._of_master, self._of_node = options, of_master, of_node
        self._env = env
        self.secret = self.write_secret("secret")
        self._line = ""

    @contextlib.contextmanager
    def connected(self) -> Iterator[Cluster]:
        """Skips the test where there can be no namespaces."""
        if reason := lacking():
            pytest.skip(reason)
        pid = os.getpid()
        outside = f"10.{100 + pid % 150}.{pid // 150 % 250}"
        with contextlib.ExitStack() as stack:
            self.master, self.node = (stack.enter_context(Host(n)) for n in ("master", "node-a"))
            stack.enter_context(cable(None, f"{outside}.1", self.master, f"{outside}.2"))
            self._line = stack.enter_context(cable(self.master, MASTER_IP, self.node, NODE_IP))
            self.url = f"http://{outside}.2:8000"
            yield self

    def write_secret(self, name: str) -> str:
        path = self.folder / name
        path.write_text(secrets.token_hex(32))
        path.chmod(0o600)
        return str(path)

    def start_master(self, *more: str) -> Program:
        served = ("--host", "0.0.0.0", "--served-model-name", "model")
        return self._start(self.master, self.model, *served, *self._of_master, *more)

    def start_node(self, *more: str, model: Path | None = None) -> Program:
        return self._start(self.node, model or self.model, "--headless", *self._of_node, *more)

    def _start(self, host: Host, model: Path, *more: str) -> Program:
        options = (*self._options, "--cluster-secret-file", self.secret, *more)
        return host.start(RINGCAST, "serve", str(model), *options, **self._env)

    @contextlib.contextmanager
    def cut(self) -> Iterator[None]:
        """No cable meanwhile."""
        self.master.do("ip", "link", "set", self._line, "down")
        try:
            yield
        finally:
            self.master.do("ip", "link", "set", self._line, "up")

    def kill(self, name: str) -> None:
        """One of the master's actors, by kill -9."""
        os.kill(self.master.outer_pid(self.pids()[name]), signal.SIGKILL)


def _children(pid: int) -> list[int]:
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return [int(word) for word in file.read().split()]
