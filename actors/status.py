"""What a supervisor answers to who asks how all actors are."""

from __future__ import annotations

from collections.abc import Mapping

from ..mq.supervision import ActorStatus, EdgeStatus, Status
from .child import Child
from .linux import usage


def status_of(
    children: Mapping[str, Child],
    restarts: Mapping[str, int],
    edges: list[EdgeStatus],
    statistics: Mapping[str, Mapping[str, float]],
) -> Status:
    """statistics: by who says so, the supervisor itself included."""
    actors = []
    for name, child in children.items():
        cpu, rss = usage(child.pid) if child.state != "dead" else (0.0, 0)
        actors.append(ActorStatus(name, child.pid, child.state, cpu, rss, restarts.get(name, 0)))
    named = {f"{who}.{key}": v for who, values in statistics.items() for key, v in values.items()}
    return Status(actors, edges, named)
