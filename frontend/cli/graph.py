"""The process graph as it is drawn: actors/topology.py's rows, with a place for each actor.

A place is a layer and a lane. Layers run with the pipeline, from the actor that the first edge
starts at: every edge leads to a later layer than its source's, except back edges, which close a
cycle. Lanes lie below each other: the first of an actor's targets keeps its lane, those that are
restarted together with it before others, and each further one takes the next free lane of its
layer. Nothing here knows any actor by name.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Literal

import msgspec

from ...actors import topology
from ...actors.topology import ActorRow, Channel, EdgeRow

Place = tuple[int, int]


class Node(msgspec.Struct, frozen=True):
    """All instances of one kind of actor. pids: of those that run, by instance.

    units: the failure units that the instances belong to, in their order. together: other actors
    are in them too.
    """

    kind: str
    target: str
    instances: list[str]
    units: list[str]
    together: bool
    layer: int
    lane: int
    pids: dict[str, int]

    @property
    def restarted(self) -> str:
        """As what it's restarted, in words."""
        return f"as {', '.join(self.units)}" if self.together else "alone"


class Arrow(msgspec.Struct, frozen=True):
    """All channels of one edge. back: it leads to no later layer."""

    source: str
    target: str
    messages: str
    fan: Literal["each", "broadcast"]
    back: bool
    channels: list[Channel]

    @property
    def fan_in_words(self) -> str:
        """How the instances are joined: "each × 4" (channels), "broadcast to 4" (readers)."""
        if self.fan == "broadcast":
            return f"broadcast to {len(self.channels[0].readers)}"
        return "each" if len(self.channels) == 1 else f"each × {len(self.channels)}"


class Graph(msgspec.Struct, frozen=True):
    """nodes: by layer, then by lane. arrows: in topology.py's order. transport: "" if not known."""

    nodes: list[Node]
    arrows: list[Arrow]
    units: dict[str, list[str]]
    transport: str = ""

    @property
    def num_processes(self) -> int:
        return sum(len(node.instances) for node in self.nodes)

    @property
    def num_channels(self) -> int:
        return sum(len(arrow.channels) for arrow in self.arrows)


def make_graph(
    counts: dict[str, int],
    transport: str = "",
    pids: Mapping[str, int] | None = None,
    edges: Collection[str] = (),
) -> Graph:
    """The graph with so many instances of each kind (where not said, as many as usual). Of kinds
    that have none nothing is drawn. pids, edges: of a server, which may have a part of it alone."""
    names, channels = topology.instances(counts), topology.channels(counts)
    if pids is not None:
        names = [name for name in names if name in pids]
        channels = [channel for channel in channels if channel.name in edges]
    parts = {unit: [n for n in names if n in all_] for unit, all_ in topology.units(counts).items()}
    units = {unit: members for unit, members in parts.items() if members}
    there = {_kind(name) for name in names}
    rows = tuple(row for row in topology.ACTORS if row.kind in there)
    drawn = tuple(e for e in topology.EDGES if {e.source, e.target} <= there)
    places = place(rows, drawn)
    nodes = [_node(row, names, units, places[row.kind], pids or {}) for row in rows]
    arrows = [_arrow(row, places, channels) for row in drawn]
    return Graph(
        nodes=sorted(nodes, key=lambda node: (node.layer, node.lane)),
        arrows=[arrow for arrow in arrows if arrow.channels],
        units=units,
        transport=transport,
    )


def _node(
    row: ActorRow,
    everyone: list[str],
    units: dict[str, list[str]],
    where: Place,
    pids: Mapping[str, int],
) -> Node:
    names = [name for name in everyone if _kind(name) == row.kind]
    mine = [unit for unit, members in units.items() if any(name in members for name in names)]
    return Node(
        kind=row.kind,
        target=row.target,
        instances=names,
        units=mine,
        together=any(_kind(member) != row.kind for unit in mine for member in units[unit]),
        layer=where[0],
        lane=where[1],
        pids={name: pids[name] for name in names if name in pids},
    )


def _arrow(row: EdgeRow, places: dict[str, Place], channels: list[Channel]) -> Arrow:
    mine = [
        channel
        for channel in channels
        if (_kind(channel.writer), _kind(channel.readers[0])) == (row.source, row.target)
        and channel.messages == row.messages
    ]
    return Arrow(
        source=row.source,
        target=row.target,
        messages=row.messages,
        fan=row.fan,
        back=places[row.target][0] <= places[row.source][0],
        channels=mine,
    )


def _kind(instance: str) -> str:
    return instance.partition(".")[0]


def place(actors: tuple[ActorRow, ...], edges: tuple[EdgeRow, ...]) -> dict[str, Place]:
    """Each actor's layer and lane. No two have the same."""
    unit = {row.kind: row.unit for row in actors}
    starts = [edges[0].source, *unit] if edges else list(unit)
    forward = _without_back_edges(starts, edges)
    layers = dict.fromkeys(unit, 0)
    for kind in forward:  # an actor's layer is final when its turn comes
        for target in forward[kind]:
            layers[target] = max(layers[target], layers[kind] + 1)
    lanes: dict[str, int] = {}
    taken: set[Place] = set()

    def settle(kind: str, lane: int) -> None:
        if kind in lanes:
            return
        while (layers[kind], lane) in taken:
            lane += 1
        lanes[kind] = lane
        taken.add((layers[kind], lane))
        for target in sorted(forward[kind], key=lambda other: unit[other] != unit[kind]):
            settle(target, lane)

    for kind in starts:
        settle(kind, 0)
    return {kind: (layers[kind], lanes[kind]) for kind in unit}


def _without_back_edges(starts: list[str], edges: tuple[EdgeRow, ...]) -> dict[str, list[str]]:
    """Who follows whom when edges to an actor that is still being followed are left out.

    Sources come before their targets.
    """
    follows: dict[str, list[str]] = {}
    open_kinds: set[str] = set()

    def visit(kind: str) -> None:
        if kind in follows or kind in open_kinds:
            return
        open_kinds.add(kind)
        targets = list(dict.fromkeys(e.target for e in edges if e.source == kind))
        onward = [target for target in targets if target not in open_kinds]
        for target in onward:
            visit(target)
        open_kinds.remove(kind)
        follows[kind] = onward

    for kind in starts:
        visit(kind)
    return dict(reversed(follows.items()))
