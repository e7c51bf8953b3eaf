"""What Ray is asked for: room for one replica, all of it on one of Ray's nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from ...mq.config import EngineConfig

_SHOWN = ("CPU", "GPU")
_MOST_NODES = 8  # that a message names


class RayNode(msgspec.Struct, frozen=True):
    """A living node of Ray, and what it has in all."""

    address: str
    resources: dict[str, float]


def ask_of(engine: EngineConfig) -> dict[str, float]:
    """A replica's resources, by Ray's names: a GPU for each worker on device cuda, else the CPUs of
    its threads."""
    workers = engine.num_workers
    if engine.device == "cuda":
        return {"CPU": float(workers), "GPU": float(workers)}
    return {"CPU": float(workers * (engine.num_threads or 1))}


def lack(
    ranks: Sequence[int],
    ask: Mapping[str, float],
    nodes: Sequence[RayNode],
    free: Mapping[str, float],
) -> str:
    """That there is no room, in words. free: of all nodes together."""
    names = [*_SHOWN, *(name for name in ask if name not in _SHOWN)]
    who = f"rank {ranks[0]} waits" if len(ranks) == 1 else f"ranks {_list(ranks)} wait"
    each = "" if len(ranks) == 1 else ", for each"
    there = ", ".join(f"{node.address} ({_words(node.resources, names)})" for node in _most(nodes))
    more = f" and {len(nodes) - _MOST_NODES} more" if len(nodes) > _MOST_NODES else ""
    fits = [node for node in nodes if all(node.resources.get(k, 0) >= v for k, v in ask.items())]
    verdict = "" if fits else "; none of them is large enough"
    return (
        f"{who} for room on the Ray cluster: {_words(ask, list(ask))} on one node{each}. "
        f"It has {there or 'no nodes'}{more}, of which {_words(free, names)} are free{verdict}"
    )


def _most(nodes: Sequence[RayNode]) -> list[RayNode]:
    """Those with the most first."""
    return sorted(nodes, key=lambda node: [-node.resources.get(name, 0) for name in _SHOWN[::-1]])[
        :_MOST_NODES
    ]


def _words(resources: Mapping[str, float], names: Sequence[str]) -> str:
    return ", ".join(f"{resources.get(name, 0):g} {name}" for name in names)


def _list(ranks: Sequence[int]) -> str:
    return f"{', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"
