"""The launcher's process, as the master holds it.

    phase     | event                        | then     | and does
    ----------|------------------------------|----------|------------------------------------------
    PLACING   | Placed                       | PLACED   | `place` returns; `keep` says Launch
    PLACING   | CannotLaunch, or it dies     | RESTING  | `place` raises; `keep` tries again
    PLACED    | HostEnded                    | PLACED   | tells; a hopeless one ends a master that
              |                              |          | doesn't serve yet
    PLACED    | it dies, or Ray's head does  | RESTING  | likewise; Ray ends what it had started
    RESTING   | longer and longer each time  | PLACING  | a new process

So once the master serves, no death of Ray's ends it: its replicas are lost, as hosts are, and come
back with Ray.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
from typing import Any, Protocol

from ...actors.control import Control
from ...actors.linux import describe_exit
from ...mq.errors import ConfigError, RingcastError
from ...mq.launching import CannotLaunch, HostEnded, Launch, LauncherToMaster, Notice, Place, Placed

_FIRST_REST = 1.0
_LONGEST_REST = 60.0
_END_SECONDS = 20.0  # that it has to end all replicas, and itself
_TAIL_BYTES = 4096


class LauncherError(RingcastError):
    """The launcher can't do its work, or has died."""


class LauncherOwner(Protocol):
    def notice(self, text: str) -> None:
        """Something that people should know."""

    def cannot_launch(self, error: str, user_error: bool) -> None:
        """Replicas can't be started, by what is known. It is tried again all the same."""


class RayLauncher:
    """An asynchronous context manager; everything that it has started ends with it.

    module: the launcher's program.
    """

    def __init__(
        self,
        order: Place,
        owner: LauncherOwner,
        module: str = "ringcast.frontend.launch.ray_driver",
    ) -> None:
        self._order = order
        self._owner = owner
        self._module = module
        self._process: _Process | None = None

    async def __aenter__(self) -> RayLauncher:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._end()

    async def place(self) -> Placed:
        """Have it find room for all ranks.

        Raises ConfigError where the user can help it, and LauncherError elsewhere.
        """
        await self._end()
        process = self._process = _Process(self._module)
        process.send(self._order)
        while True:
            match await process.hear():
                case Notice(text=text):
                    self._owner.notice(text)
                case Placed() as placed:
                    return placed
                case CannotLaunch(error=error, user_error=user_error):
                    raise ConfigError(error) if user_error else LauncherError(error)
                case None:
                    raise LauncherError(await process.describe_death())

    async def keep(self, launch: Launch) -> None:
        """Have it start the replicas that were placed, and keep them running."""
        while True:
            reason = await self._watch(launch)
            self._owner.cannot_launch(reason, False)
            await self._place_again(reason)

    async def _watch(self, launch: Launch) -> str:
        """Until it dies. Returns why."""
        process = self._process
        assert process is not None
        process.send(launch)
        while True:
            match await process.hear():
                case Notice(text=text):
                    self._owner.notice(text)
                case HostEnded(error=error, hopeless=hopeless, seconds=seconds):
                    if hopeless:
                        self._owner.cannot_launch(error, True)
                    self._owner.notice(f"{error}\nIt is started again in {seconds:g} s")
                case CannotLaunch(error=error):
                    return error
                case None:
                    return await process.describe_death()

    async def _place_again(self, reason: str) -> None:
        rest = _FIRST_REST
        while True:
            self._owner.notice(f"{reason}\nRay is tried again in {rest:g} s")
            await asyncio.sleep(rest)
            try:
                await self.place()
                return
            except RingcastError as error:
                reason, rest = str(error), min(2 * rest, _LONGEST_REST)

    async def _end(self) -> None:
        if self._process is not None:
            process, self._process = self._process, None
            await process.end()


class _Process:
    """One life of the launcher."""

    def __init__(self, module: str) -> None:
        self._loop = asyncio.get_running_loop()
        self._heard: asyncio.Queue[Any] = asyncio.Queue()  # None: it is gone
        self._tail = b""
        self._ended: asyncio.Future[None] = self._loop.create_future()
        ours, theirs = Control.pair()
        with theirs:
            self._popen = _start(module, theirs)
        self._control = Control(ours, LauncherToMaster)
        self._pidfd = os.pidfd_open(self._popen.pid)
        assert self._popen.stderr is not None
        self._stderr = self._popen.stderr.fileno()
        os.set_blocking(self._stderr, False)
        self._loop.add_reader(self._control.fileno(), self._on_control)
        self._loop.add_reader(self._stderr, self._on_stderr)
        self._loop.add_reader(self._pidfd, self._on_end)

    def send(self, message: Place | Launch) -> None:
        if not self._control.send(message):  # it has died, or will never have understood
            self._heard.put_nowait(None)

    async def hear(self) -> Any:
        """The next message; None when there is none any more."""
        return await self._heard.get()

    async def describe_death(self) -> str:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_END_SECONDS):
                await asyncio.shield(self._ended)
        status = self._popen.poll()
        how = "it has closed its end" if status is None else describe_exit(status)
        said = self._tail.decode(errors="replace").strip()
        return f"the launcher of replicas on Ray died: {how}" + (f"\n{said}" if said else "")

    async def end(self) -> None:
        """It ends all that it has started, in order if it does so in time; else Ray does."""
        self._stop_reading(self._control.fileno())
        self._control.close()
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_END_SECONDS):
                    await asyncio.shield(self._ended)
        finally:
            if self._popen.poll() is None:
                self._popen.kill()
            self._popen.wait()
            self._stop_reading(self._pidfd)
            self._stop_reading(self._stderr)
            os.close(self._pidfd)
            assert self._popen.stderr is not None
            self._popen.stderr.close()

    def _on_control(self) -> None:
        try:
            while (packet := self._control.receive()) is not None:
                self._heard.put_nowait(packet[0])
        except EOFError:
            self._stop_reading(self._control.fileno())
            self._heard.put_nowait(None)

    def _on_stderr(self) -> None:
        data = os.read(self._stderr, 1 << 16)
        self._tail = (self._tail + data)[-_TAIL_BYTES:]
        if not data:
            self._stop_reading(self._stderr)

    def _on_end(self) -> None:
        self._stop_reading(self._pidfd)
        self._popen.poll()
        if not self._ended.done():
            self._ended.set_result(None)

    def _stop_reading(self, fd: int) -> None:
        self._loop.remove_reader(fd)


def _start(module: str, theirs: socket.socket) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-P", "-m", module, str(theirs.fileno())],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,  # Ray writes to both
        stderr=subprocess.PIPE,
        pass_fds=(theirs.fileno(),),
        start_new_session=True,  # Ctrl-C is the master's, and so are Ray's own processes' ends
    )
