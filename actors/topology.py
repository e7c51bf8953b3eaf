"""The process graph: which actors there are, how many, who talks to whom. Only here is it known.

A row names the actor's class by dotted string, so that nothing is imported before its own process
needs it. Its unit is what is restarted together: when one of an engine's processes dies, the others
have nothing left to work on. An edge goes from every instance of its source to the instances of its
target: "each" gives every pair a channel of its own, "broadcast" gives every source one channel
that all targets read. `channels()` writes the graph out.
"""

from __future__ import annotations

from typing import Literal

import msgspec


class ActorRow(msgspec.Struct, frozen=True):
    """kind: the actor's name; target: "module:class" of its shell; unit: what it's restarted
    with."""

    kind: str
    target: str
    unit: str


class EdgeRow(msgspec.Struct, frozen=True):
    source: str
    target: str
    messages: str  # the union in mq/messages.py
    fan: Literal["each", "broadcast"] = "each"


# In starting order: the slowest to become ready comes first.
ACTORS = (
    ActorRow("worker", "ringcast.actors.worker:Worker", "engine"),
    ActorRow("client", "ringcast.frontend.http.actor:ApiServer", "client"),
    ActorRow("tokenizer", "ringcast.actors.tokenizer:Tokenizer", "tokenizer"),
    ActorRow("detokenizer", "ringcast.actors.detokenizer:Detokenizer", "detokenizer"),
    ActorRow("scheduler", "ringcast.actors.scheduler.actor:Scheduler", "engine"),
)

EDGES = (
    EdgeRow("client", "tokenizer", "ClientToTokenizer"),
    EdgeRow("tokenizer", "client", "TokenizerToClient"),
    EdgeRow("tokenizer", "scheduler", "TokenizerToScheduler"),
    EdgeRow("scheduler", "worker", "SchedulerToWorker", "broadcast"),
    EdgeRow("worker", "scheduler", "WorkerToScheduler"),
    EdgeRow("scheduler", "detokenizer", "SchedulerToDetokenizer"),
    EdgeRow("detokenizer", "scheduler", "DetokenizerToScheduler"),
    EdgeRow("detokenizer", "client", "DetokenizerToClient"),
)


class Channel(msgspec.Struct, frozen=True):
    """One channel of a topology: its writer and its readers, as instance names ("tokenizer.0")."""

    name: str
    writer: str
    readers: tuple[str, ...]
    messages: str


def instances(counts: dict[str, int]) -> list[str]:
    """All actors' names, in starting order."""
    return [f"{row.kind}.{i}" for row in ACTORS for i in range(counts.get(row.kind, 1))]


def units(counts: dict[str, int]) -> dict[str, tuple[str, ...]]:
    """What is restarted together, by its name: {"engine.0": ("worker.0", "scheduler.0"), ...}."""
    out: dict[str, tuple[str, ...]] = {}
    for row in ACTORS:
        for i in range(counts.get(row.kind, 1)):
            unit = "engine.0" if row.unit == "engine" else f"{row.unit}.{i}"
            out[unit] = (*out.get(unit, ()), f"{row.kind}.{i}")
    return out


def target(kind: str) -> str:
    """Where the shell of this kind of actor lives, as "module:class"."""
    return next(row.target for row in ACTORS if row.kind == kind)


def channels(counts: dict[str, int]) -> list[Channel]:
    """Every channel of a topology with so many instances of each kind (1 where not said)."""
    out: list[Channel] = []
    for edge in EDGES:
        targets = [f"{edge.target}.{i}" for i in range(counts.get(edge.target, 1))]
        for i in range(counts.get(edge.source, 1)):
            source = f"{edge.source}.{i}"
            if edge.fan == "broadcast":
                out.append(
                    Channel(f"{source}>{edge.target}s", source, tuple(targets), edge.messages)
                )
            else:
                out += [Channel(f"{source}>{t}", source, (t,), edge.messages) for t in targets]
    return out
