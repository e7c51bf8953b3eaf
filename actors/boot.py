"""What an actor's process is told at birth, and the process's first lines.

    python -P -m ringcast.actors.boot FD

reads a Boot as MessagePack from the inherited descriptor FD, binds itself to its parent's life,
imports its actor and runs it.
"""

from __future__ import annotations

import importlib
import os
import signal
import socket
import sys
import traceback
from typing import Any

import msgspec

from ..mq import supervision
from ..mq.cluster_config import ClusterPlace
from ..mq.config import EngineConfig, ModelSpec
from ..mq.endpoint import Endpoint
from ..mq.errors import ConfigError, NodeEndError, NodeLostError
from ..mq.server_config import ServerConfig
from .control import Control, shorten
from .linux import die_with_parent, read_fd, take_signals


class Boot(msgspec.Struct, frozen=True, kw_only=True):
    """What an actor is told.

    actor: the instance's name ("tokenizer.0"). target: "module:class" of its shell. counts: how
    many instances of each kind there are. group_fd: an empty anonymous file that the workers
    started together share, and who mirrors it; -1 where a worker is the only one. tallies_fd: what
    the API servers count together. cluster: this host's place, where there are several.
    """

    actor: str
    target: str
    parent_pid: int
    control_fd: int
    engine: EngineConfig
    spec: ModelSpec
    endpoints: list[Endpoint]
    counts: dict[str, int] = {}
    group_fd: int = -1
    server: ServerConfig | None = None
    listen_fd: int = -1
    tallies_fd: int = -1
    cluster: ClusterPlace | None = None


def main() -> int:
    boot = msgspec.msgpack.decode(read_fd(int(sys.argv[1])), type=Boot)
    die_with_parent(boot.parent_pid)
    # Ctrl-C and a service manager's SIGTERM reach the whole group; the supervisor alone decides
    # what they mean.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    take_signals()
    control = Control(socket.socket(fileno=boot.control_fd), supervision.SupervisorToActor)
    try:
        module, _, name = boot.target.partition(":")
        actor: Any = getattr(importlib.import_module(module), name)(boot, control)
        actor.run()
    except BaseException as error:
        control.send(_last_words(error))
        return 1
    return 0


def _last_words(error: BaseException) -> supervision.ActorFailed:
    text = shorten("".join(traceback.format_exception(error)))
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        (error,) = error.exceptions
    # Of these the reason is on another host: no trace leads there.
    if isinstance(error, NodeEndError):
        return supervision.ActorFailed(str(error), "", exit_code=error.exit_code)
    if isinstance(error, NodeLostError):
        return supervision.ActorFailed(str(error), "", from_outside=error.from_outside)
    if isinstance(error, ConfigError):
        return supervision.ActorFailed(shorten(str(error)), text, user_error=True)
    return supervision.ActorFailed(shorten(f"{type(error).__name__}: {error}"), text)


if __name__ == "__main__":
    code = main()
    # Nothing is left to be tidied, and tearing down torch or ZeroMQ can take a second.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
