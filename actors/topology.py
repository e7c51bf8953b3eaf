"""The process graph: which actors there are, how many, who talks to whom. Only here is it known.

A row names the actor's class by dotted string, so that nothing is imported before its own process
needs it. Its unit is what is restarted together: when one of an engine's processes dies, the others
have nothing left to work on. An edge goes from every instance of its source to the instances of its
target: "each" gives every pair a channel of its own, "broadcast" gives every source one channel
that all targets read. `channels()` writes the graph out.

How many there are of a kind is a dict by kind, of all that run; where it says nothing, it is what
the row says. A scheduler and the workers that read its plans are an engine, or *replica*: engine e
is scheduler.e and, of T workers each, worker.(e * T) to worker.(e * T + T - 1). Only `engine_of`
knows. Edges between the parts of an engine stay within it; tokenizers, detokenizers and the
coordinator serve all. Replicas that step together (counts["lockstep"]) wait for each other in every
step: they are one unit, and the coordinator has something to say to them.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from ..mq.config import EngineConfig
from ..mq.server_config import ServerConfig

ENGINE = "engine"
LOCKSTEP = "lockstep"


class ActorRow(msgspec.Struct, frozen=True):
    """kind: the actor's name; target: "module:class" of its shell; unit: what it's restarted with;
    count: how many there are where nobody says."""

    kind: str
    target: str
    unit: str
    count: int = 1


class EdgeRow(msgspec.Struct, frozen=True):
    source: str
    target: str
    messages: str  # the union in mq/messages.py
    fan: Literal["each", "broadcast"] = "each"
    lockstep: bool = False  # only there where replicas step together


# In starting order: the slowest to become ready comes first.
ACTORS = (
    ActorRow("worker", "ringcast.actors.worker:Worker", ENGINE),
    ActorRow("mirror", "ringcast.actors.mirror:Mirror", ENGINE, 0),  # see hosts.py
    ActorRow("client", "ringcast.frontend.http.actor:ApiServer", "client"),
    ActorRow("tokenizer", "ringcast.actors.tokenizer:Tokenizer", "tokenizer"),
    ActorRow("detokenizer", "ringcast.actors.detokenizer:Detokenizer", "detokenizer"),
    ActorRow("coordinator", "ringcast.actors.coordinator:Coordinator", "coordinator", 0),
    ActorRow("scheduler", "ringcast.actors.scheduler.actor:Scheduler", ENGINE),
    ActorRow("gateway", "ringcast.actors.node_gateway:NodeGateway", ENGINE, 0),  # see hosts.py
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
    EdgeRow("scheduler", "coordinator", "SchedulerToCoordinator"),
    EdgeRow("coordinator", "client", "CoordinatorToClient"),
    EdgeRow("coordinator", "scheduler", "CoordinatorToScheduler", lockstep=True),
)


class Channel(msgspec.Struct, frozen=True):
    """One channel of a topology: its writer and its readers, as instance names ("tokenizer.0")."""

    name: str
    writer: str
    readers: tuple[str, ...]
    messages: str


def counts_of(engine: EngineConfig, server: ServerConfig | None = None) -> dict[str, int]:
    """How many of each kind the options of an engine, and of its HTTP server, ask for."""
    counts = counts_for(engine.data_parallel_size, engine.num_workers)
    counts |= {"tokenizer": engine.tokenizer_count, "detokenizer": engine.detokenizer_count}
    if engine.lockstep:
        counts[LOCKSTEP] = 1
    return counts if server is None else {**counts, "client": server.api_server_count}


def counts_for(replicas: int, ranks: int) -> dict[str, int]:
    """Likewise, of so many replicas that have so many workers each."""
    return {
        "worker": replicas * ranks,
        "scheduler": replicas,
        "coordinator": int(replicas > 1),
    }


def num_engines(counts: dict[str, int]) -> int:
    return counts.get("scheduler", 1)


def engine_of(name: str, counts: dict[str, int]) -> int | None:
    """The number of the engine that an actor is a part of; None for what serves all of them."""
    kind, _, number = name.partition(".")
    if _row(kind).unit != ENGINE:
        return None
    return int(number) * num_engines(counts) // count_of(kind, counts)


def group_of(name: str, counts: dict[str, int]) -> int | None:
    """The engines that are restarted together with an actor's: the first one's number."""
    engine = engine_of(name, counts)
    return 0 if engine is not None and counts.get(LOCKSTEP) else engine


def rank_of(worker: str, counts: dict[str, int]) -> int:
    """A worker's rank in its engine."""
    return int(worker.partition(".")[2]) % ranks_per_engine(counts)


def ranks_per_engine(counts: dict[str, int]) -> int:
    return count_of("worker", counts) // num_engines(counts)


def instances(counts: dict[str, int]) -> list[str]:
    """All actors' names, in starting order."""
    return [f"{row.kind}.{i}" for row in ACTORS for i in range(count_of(row.kind, counts))]


def units(counts: dict[str, int]) -> dict[str, tuple[str, ...]]:
    """What is restarted together, by its name: {"engine.0": ("worker.0", "scheduler.0"), ...}.

    Replicas that step together are all "engine.0".
    """
    out: dict[str, tuple[str, ...]] = {}
    for name in instances(counts):
        engine = engine_of(name, counts)
        unit = name if engine is None else f"{ENGINE}.{group_of(name, counts)}"
        out[unit] = (*out.get(unit, ()), name)
    return out


def target(kind: str) -> str:
    """Where the shell of this kind of actor lives, as "module:class"."""
    return _row(kind).target


def channels(counts: dict[str, int]) -> list[Channel]:
    """Every channel of a topology with so many instances of each kind (what the rows say where not
    said)."""
    out: list[Channel] = []
    for edge in EDGES:
        if edge.lockstep and not counts.get(LOCKSTEP):
            continue
        for i in range(count_of(edge.source, counts)):
            source = f"{edge.source}.{i}"
            targets = _targets(edge, source, counts)
            if edge.fan == "broadcast":
                out.append(Channel(f"{source}>{edge.target}s", source, targets, edge.messages))
            else:
                out += [Channel(f"{source}>{t}", source, (t,), edge.messages) for t in targets]
    return out


def _targets(edge: EdgeRow, source: str, counts: dict[str, int]) -> tuple[str, ...]:
    names = [f"{edge.target}.{i}" for i in range(count_of(edge.target, counts))]
    engine = engine_of(source, counts)
    return tuple(
        name for name in names if engine is None or engine_of(name, counts) in (None, engine)
    )


def count_of(kind: str, counts: dict[str, int]) -> int:
    """How many there are of a kind."""
    return counts.get(kind, _row(kind).count)


def _row(kind: str) -> ActorRow:
    return next(row for row in ACTORS if row.kind == kind)
