"""The coordinator's core: it hears what each replica has to do, and tells all clients.

    Load            of a replica: kept, and told at the next publication
    a replica lost  nothing is known of it, until its next incarnation says something
    a client lost   its next incarnation has nothing anywhere
    WantWave        of a replica that steps with the others: all are told to start it
                    (scheduler/waves.py)
    one added       nothing is known of it; one that was removed keeps its place

It publishes when something has changed, at most every `interval` seconds. A core has no timer, so
it says when it wants to be flushed again (`due`). It keeps nothing that a new incarnation would
miss: what it doesn't know, clients go on to take for what they knew last. Which wave should run it
asks the replicas, at its start and when one was lost: it may have heard the dead after the living.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..mq.messages import AskWave, Load, Loads, StartWave, WantWave
from .core import PeerAdded, PeerLost, Send

PUBLISH_SECONDS = 0.1
UNKNOWN = -1


class CoordinatorCore:
    """See actors/core.py. interval: seconds between two publications, at least."""

    def __init__(
        self,
        num_engines: int,
        num_clients: int = 1,
        interval: float = PUBLISH_SECONDS,
        lockstep: bool = False,
    ) -> None:
        self._waiting = np.full(num_engines, UNKNOWN, dtype=np.int32)
        self._running = np.full(num_engines, UNKNOWN, dtype=np.int32)
        self._kv_usage = np.full(num_engines, UNKNOWN, dtype=np.float32)
        self._ours = np.zeros((num_clients, num_engines), dtype=np.int32)
        self._interval = interval
        self._changed = False
        self._published_at = -math.inf
        self._num_reports = 0
        self._num_published = 0
        self._lockstep = self._asks = lockstep
        self._started = 0  # the wave that was started last

    @property
    def due(self) -> float | None:
        """When `flush` has something to do, if nothing else happens."""
        if self._asks:
            return -math.inf
        return self._published_at + self._interval if self._changed else None

    def handle(self, source: str, message: Any, now: float) -> Sequence[Send]:
        kind, _, number = source.partition(".")
        if isinstance(message, Load):
            self._report(int(number), message)
        elif isinstance(message, WantWave):
            return self._start(message.wave)
        elif isinstance(message, PeerAdded):
            if kind == "scheduler":
                self._grow(int(number) + 1)
        else:
            assert isinstance(message, PeerLost), f"{source} sent {message!r}"
            if kind == "scheduler":
                self._lose(int(number))
            elif kind == "client":
                self._ours[int(number)] = 0
        return ()

    def flush(self, now: float) -> Sequence[Send]:
        asks = self._to_all(AskWave()) if self._asks else []
        self._asks = False
        return [*asks, *self._publish(now)]

    def _publish(self, now: float) -> Sequence[Send]:
        if not self._changed or now < self._published_at + self._interval:
            return ()
        self._changed = False
        self._published_at = now
        self._num_published += 1
        waiting, running = self._waiting.tobytes(), self._running.tobytes()
        kv_usage, num_clients = self._kv_usage.tobytes(), len(self._ours)
        return [
            Send(f"client.{client}", Loads(waiting, running, ours.tobytes(), kv_usage, num_clients))
            for client, ours in enumerate(self._ours)
        ]

    def statistics(self) -> dict[str, float]:
        return {"reports": self._num_reports, "published": self._num_published}

    def _start(self, wave: int) -> Sequence[Send]:
        """Again if another one was between: who knows it already doesn't mind."""
        if wave == self._started:
            return ()
        self._started = wave
        return self._to_all(StartWave(wave))

    def _to_all(self, message: StartWave | AskWave) -> list[Send]:
        return [Send(f"scheduler.{engine}", message) for engine in range(len(self._waiting))]

    def _report(self, engine: int, load: Load) -> None:
        self._num_reports += 1
        self._changed = True
        self._waiting[engine] = load.waiting
        self._running[engine] = load.running
        self._kv_usage[engine] = load.kv_usage
        self._ours[:, engine] = 0
        for client, choices in load.clients:
            self._ours[client, engine] = choices

    def _grow(self, num_engines: int) -> None:
        more = num_engines - len(self._waiting)
        if more <= 0:
            return
        place = (0, more)
        self._waiting = np.pad(self._waiting, place, constant_values=UNKNOWN)
        self._running = np.pad(self._running, place, constant_values=UNKNOWN)
        self._kv_usage = np.pad(self._kv_usage, place, constant_values=UNKNOWN)
        self._ours = np.pad(self._ours, ((0, 0), (0, more)))

    def _lose(self, engine: int) -> None:
        self._changed = True
        self._waiting[engine] = self._running[engine] = self._kv_usage[engine] = UNKNOWN
        self._ours[:, engine] = 0
        self._started = 0
        self._asks = self._lockstep
