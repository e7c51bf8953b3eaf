"""Several "hosts" on one: namespaces with a network, processes, /dev/shm and a name of their own.

Needs root, `unshare`, `nsenter` and `ip`; `lacking` says what is missing.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import subprocess
import threading
from collections.abc import Iterator

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


def _children(pid: int) -> list[int]:
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return [int(word) for word in file.read().split()]
