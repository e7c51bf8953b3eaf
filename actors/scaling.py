"""Scales that clients have asked for: what can't be, who has asked, and what new replicas are.

`ScaleAsks` is a client's side, `Scaling` the supervisor's. What happens in between is the table of
elastic.py.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from ..mq.config import EngineConfig
from ..mq.devices import num_cuda_devices
from ..mq.errors import (
    EngineDeadError,
    InvalidRequestError,
    OverloadedError,
    RequestFailedError,
)
from ..mq.messages import Message
from ..mq.supervision import Scale, Scaled
from . import topology

MOST_REPLICAS = 64


class ScaleAsks:
    """send: to the supervisor."""

    def __init__(self, send: Callable[[Message], object]) -> None:
        self._send = send
        self._waiting: dict[int, asyncio.Future[Scaled]] = {}

    async def ask(self, replicas: int, drain_seconds: float | None = None) -> int:
        """Until there are so many replicas; how many there are. drain_seconds: as in Scale.

        Raises InvalidRequestError for what can't be (with status 409 while another scale is under
        way), OverloadedError, RequestFailedError where it was tried and taken back, and
        EngineDeadError.
        """
        number = time.monotonic_ns()
        answer: asyncio.Future[Scaled] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        self._send(Scale(number, replicas, -1.0 if drain_seconds is None else drain_seconds))
        try:
            scaled = await answer
        finally:
            del self._waiting[number]
        if scaled.error:
            raise _error(scaled)
        return scaled.replicas

    def answered(self, message: Scaled) -> None:
        answer = self._waiting.get(message.ask)
        if answer is not None and not answer.done():
            answer.set_result(message)

    def fail(self, error: str) -> None:
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(EngineDeadError(error))


def _error(scaled: Scaled) -> InvalidRequestError | OverloadedError | RequestFailedError:
    if scaled.status == OverloadedError.status:
        return OverloadedError(scaled.error)
    if scaled.status >= 500:
        return RequestFailedError(f"{scaled.error}; replicas, as before: {scaled.replicas}")
    error = InvalidRequestError(scaled.error, param="replicas")
    error.status = scaled.status
    return error


class Scaling:
    """is_cluster: whether replicas are on several hosts."""

    def __init__(self, engine: EngineConfig, is_cluster: bool) -> None:
        self._engine = engine
        self._is_cluster = is_cluster
        self._asked: tuple[str, int] | None = None  # the client, and its ask

    def refusal(self, replicas: int) -> str:
        """Why this engine can't have so many replicas at any time; empty if it can."""
        engine = self._engine
        if self._is_cluster:
            return "replicas are on several hosts: start or end their headless servers instead"
        if engine.enable_expert_parallel:
            return "enable_expert_parallel: its ranks are fixed; restart with other options"
        if not 1 <= replicas <= MOST_REPLICAS:
            return f"replicas = {replicas}: must be 1 to {MOST_REPLICAS}"
        ranks = engine.num_workers
        most = num_cuda_devices() if engine.device == "cuda" else 0
        if most and replicas * ranks > most:
            return (
                f"replicas = {replicas}: of {ranks} workers each they need {replicas * ranks} "
                f"CUDA devices, and there are {most}"
            )
        return ""

    def begin(self, client: str, ask: int) -> None:
        self._asked = client, ask

    def end(self, replicas: int, error: str) -> list[tuple[str, Scaled]]:
        """What is to be said to whom."""
        if self._asked is None:
            return []
        (client, ask), self._asked = self._asked, None
        return [(client, Scaled(ask, replicas, error, 500 if error else 200))]


def new_units(counts: dict[str, int], replicas: int) -> dict[str, tuple[str, ...]]:
    """The units to be added to a topology for so many replicas: the engines that it hasn't, and
    the coordinator of several."""
    now, then = topology.units(counts), topology.units(scaled(counts, replicas))
    return {name: actors for name, actors in then.items() if name not in now}


def scaled(counts: dict[str, int], replicas: int) -> dict[str, int]:
    """The counts with so many replicas. A coordinator stays, once there is one."""
    more = topology.counts_for(replicas, topology.ranks_per_engine(counts))
    coordinators = max(counts.get("coordinator", 0), more["coordinator"])
    return {**counts, **more, "coordinator": coordinators}
