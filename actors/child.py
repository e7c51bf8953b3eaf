"""One actor's process, as the supervisor holds it."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Collection
from typing import Literal

import msgspec

from ..mq import supervision
from .boot import Boot
from .control import Control
from .linux import describe_exit, start_process


class Child:
    """Started by `spawn`. It has a control connection, and a descriptor (`pidfd`) that becomes
    readable when the process ends.

    reason: why it was killed by us, if it was.
    """

    def __init__(self, name: str, process: subprocess.Popen[bytes], control: Control) -> None:
        self.name = name
        self.control = control
        self.pid = process.pid
        self.pidfd = os.pidfd_open(process.pid)
        self.state: Literal["starting", "ready", "dead"] = "starting"
        self.reason = ""
        self.last_words: supervision.ActorFailed | None = None
        self._process = process

    @property
    def was_killed(self) -> bool:
        """Whether it ended by a SIGKILL that wasn't ours."""
        return self._status == -signal.SIGKILL and not self.reason

    @property
    def exit_code(self) -> int:
        """With which it wants the topology to end; 0 if it doesn't."""
        return 0 if self.last_words is None else self.last_words.exit_code

    @property
    def was_lost(self) -> bool:
        """Whether it says that it ended by no fault of what it was given."""
        return self.last_words is not None and self.last_words.from_outside

    @classmethod
    def spawn(cls, make_boot: Callable[[int], Boot], fds: Collection[int]) -> Child:
        """make_boot: what the actor is told, given the number of its control descriptor. fds: what
        else it inherits. Raises OSError where no descriptors, processes or memory are left."""
        ours, theirs = Control.pair()
        try:
            boot = make_boot(theirs.fileno())
            order = msgspec.msgpack.encode(boot)
            process = start_process("ringcast.actors.boot", order, {theirs.fileno(), *fds})
            try:
                return cls(boot.actor, process, Control(ours, supervision.ActorToSupervisor))
            except BaseException:
                process.kill()
                process.wait()
                raise
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()

    def kill(self, reason: str = "") -> None:
        self.reason = self.reason or reason
        if self.state != "dead":
            self._process.send_signal(signal.SIGKILL)

    def reap(self) -> None:
        """Its process has ended (or is about to): take it away, and close what is left of it."""
        if self.state == "dead":
            return
        self._status = self._process.wait()
        self.state = "dead"
        os.close(self.pidfd)
        self.control.close()

    def describe_death(self) -> tuple[str, str, bool]:
        """(what happened, the child's own traceback if it sent one, whether the user did it)"""
        words = self.last_words
        if words is not None and (words.user_error or not words.traceback):  # they say it all
            return words.error, words.traceback, words.user_error
        error = f"{self.name} (pid {self.pid}) died: {describe_exit(self._status)}"
        if self.reason:
            return self.reason, "", False
        if words is not None:
            return f"{error}: {words.error}", words.traceback, False
        return error, "", False
