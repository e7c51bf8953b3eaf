"""A topology under an `LLM`: the supervisor as a process of its own, told by another.

    python -P -m ringcast.actors.embedded FD

reads an Order from the inherited descriptor FD. The maker's process is the topology's client; it
holds the other end of the control connection, gets its channel ends over it, and ends the topology
by closing it (so its death does, too).
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Sequence

import msgspec
import uvloop

from ..mq import supervision
from ..mq.config import EngineConfig, ModelSpec
from ..mq.errors import ConfigError
from .control import Control
from .effects import TellFailed, TellLost
from .linux import read_fd, take_signals
from .reporter import say
from .supervisor import Supervisor


class Order(msgspec.Struct, frozen=True, kw_only=True):
    engine: EngineConfig
    spec: ModelSpec
    control_fd: int


class ControlReporter:
    """Tells the maker's process. Deaths and returns reach it as the client that it is."""

    def __init__(self, control: Control) -> None:
        self._control = control

    def progress(self, actor: str, progress: supervision.Progress) -> None:
        self._control.send(supervision.ActorProgress(actor, progress))

    def serving(self, details: dict[str, str | int | float], addresses: list[str]) -> None:
        pass

    def draining(self, timeout: float) -> None:
        pass

    def lost(self, death: TellLost) -> None:
        pass

    def notice(self, text: str) -> None:
        say(text)

    def back(self, names: Sequence[str], seconds: float) -> None:
        pass

    def failed(self, death: TellFailed) -> None:
        pass


def main() -> int:
    order = msgspec.msgpack.decode(read_fd(int(sys.argv[1])), type=Order)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    take_signals()
    control = Control(socket.socket(fileno=order.control_fd), supervision.ActorToSupervisor)
    supervisor = Supervisor(order.engine, order.spec, ControlReporter(control), external=control)
    try:
        code: int = uvloop.run(supervisor.run())
    except ConfigError as error:  # no room for its channels
        control.send(supervision.TopologyFailed("supervisor", str(error), "", True))
        return 2
    return code


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    os._exit(code)
