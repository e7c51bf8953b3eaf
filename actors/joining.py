"""A headless host looks for its master: Hello, until the master says what to do."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
import time
from collections.abc import Callable

import msgspec

from .. import __version__
from ..mq.config import EngineConfig, ModelSpec
from ..mq.errors import ConfigError, JoinAgainError, NoMasterError
from ..mq.fingerprint import fingerprint
from ..mq.handshake import ALIKE, ALIKE_IN_NODES, ALIKE_IN_STEP, PROTOCOL, Hello, Welcome, values_of
from ..mq.link import LinkDialer

_PATIENCE_SECONDS = 5.0  # until people are told that there is no answer yet
_AGAIN_SECONDS = 1.0  # before asking again who has said so


def hello_of(
    engine: EngineConfig, spec: ModelSpec, ranks: range, session: str = "", nnodes: int = 1
) -> Hello:
    """What this host says of itself. session: that it has joined; "" to join one. nnodes: how many
    hosts share one engine; `ranks` is this one's number then."""
    alike = (*ALIKE, *ALIKE_IN_STEP) if nnodes == 1 else ALIKE_IN_NODES
    options = values_of(engine, alike)
    return Hello(
        protocol=PROTOCOL,
        version=__version__,
        nonce="",
        node=socket.gethostname(),
        attach=bool(session),
        session=session,
        start_rank=ranks.start,
        num_ranks=len(ranks),
        model=spec.name,
        fingerprint=fingerprint(spec),
        options=options if nnodes == 1 else {**options, "nnodes": nnodes},
    )


async def join(
    dialer: LinkDialer, hello: Hello, timeout: float, report: Callable[[str], None]
) -> Welcome:
    """Ask until there is a Welcome. report: is told why it takes long.

    Raises NoMasterError after `timeout` seconds, JoinAgainError where this host has joined another
    session, and ConfigError if it is refused.
    """
    deadline = time.monotonic() + timeout
    told = set()

    def tell(text: str) -> None:
        if text not in told:
            told.add(text)
            report(text)

    who = f"{'node' if 'nnodes' in hello.options else 'rank'} {hello.start_rank}"
    nobody = f"no answer from {dialer.target}"
    question = "is the master up, and is the cluster secret (--cluster-secret-file) the same?"
    while (left := deadline - time.monotonic()) > 0:
        asked = msgspec.structs.replace(hello, nonce=secrets.token_hex(8))
        with contextlib.suppress(TimeoutError):
            answer = await dialer.join(asked, min(left, _PATIENCE_SECONDS))
            if isinstance(answer, Welcome):
                return answer
            if answer.then == "join again":
                raise JoinAgainError(f"the master at {dialer.target}: {answer.reason}")
            if answer.then == "give up":
                raise ConfigError(f"the master at {dialer.target} refuses: {answer.reason}")
            tell(f"the master at {dialer.target}: {answer.reason}; asking again")
            await asyncio.sleep(min(left, _AGAIN_SECONDS))
            continue
        tell(f"{nobody} yet: {question} Trying for {timeout:g} s")
    raise NoMasterError(
        f"{nobody} for {timeout:g} s (--data-parallel-join-timeout) that lets {who} in: {question}"
    )
