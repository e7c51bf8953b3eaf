"""Where everything lies in the drawing of a process graph: boxes, and the ways of the arrows.

Boxes stand on a grid of layers (x) and lanes (y). An arrow takes one of three ways:

    facing   same lane, neighbouring layers   between the sides that face each other; a back edge
                                              sags a little
    elbow    other lane, neighbouring layers  from the bottom of the upper box down, round the
                                              corner, to the side of the lower box that faces it
    bus      all others                       down, along a line of its own below all boxes, and up

The ends at one side of a box are spread along it, in an order in which the usual arrows don't
cross: at the left and right, edges as they come in topology.py, downwards; at the bottom by where
the other end is. Coordinates are in pixels, y downwards.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Literal

import msgspec

from .graph import Arrow, Graph, Node

BOX_WIDTH, BOX_HEIGHT = 144, 104
GAP_X, GAP_Y = 190, 60
MARGIN, HEADER, BUS = 40, 84, 40
RADIUS, SAG = 16, 10

Way = Literal["facing", "elbow", "bus"]
Side = Literal["left", "right", "bottom"]
Point = tuple[float, float]


class Box(msgspec.Struct, frozen=True):
    """A rectangle; x and y are its upper left corner."""

    x: float
    y: float
    width: float = BOX_WIDTH
    height: float = BOX_HEIGHT


class Route(msgspec.Struct, frozen=True):
    """path: as in an SVG path's d. label: where the middle of the line's text is to be; its first
    line goes above that, its second below.
    """

    path: str
    label: Point


class Drawing(msgspec.Struct, frozen=True):
    """boxes: by kind. frames: around those that are restarted together, by unit. routes: in the
    order of the graph's arrows.
    """

    width: float
    height: float
    boxes: dict[str, Box]
    frames: dict[str, Box]
    routes: list[Route]


class _End(msgspec.Struct, frozen=True):
    """An arrow's end at a side of a box; `order` is its place among the ends there."""

    side: Side
    order: tuple[float, ...]


def lay_out(graph: Graph) -> Drawing:
    layers = 1 + max(node.layer for node in graph.nodes)
    lanes = 1 + max(node.lane for node in graph.nodes)
    nodes = {node.kind: node for node in graph.nodes}
    boxes = {kind: _box(node) for kind, node in nodes.items()}
    ways = [_way(nodes[arrow.source], nodes[arrow.target]) for arrow in graph.arrows]
    buses = _buses(graph.arrows, ways, nodes)
    floor = HEADER + lanes * (BOX_HEIGHT + GAP_Y) - GAP_Y / 2
    ports = _ports(graph.arrows, nodes, boxes)
    routes = []
    for i, arrow in enumerate(graph.arrows):
        start, end = ports[i, "source"], ports[i, "target"]
        if ways[i] == "facing":
            routes.append(_facing(start, end, SAG if arrow.back else 0))
        elif ways[i] == "elbow":
            routes.append(_elbow(start, end, nodes[arrow.source].lane < nodes[arrow.target].lane))
        else:
            routes.append(_along_bus(start, end, floor + BUS * (buses[i] + 0.5)))
    return Drawing(
        width=2 * MARGIN + layers * (BOX_WIDTH + GAP_X) - GAP_X,
        height=floor + BUS * len(buses) + MARGIN,
        boxes=boxes,
        frames=_frames(graph, boxes),
        routes=routes,
    )


def _box(node: Node) -> Box:
    return Box(MARGIN + node.layer * (BOX_WIDTH + GAP_X), HEADER + node.lane * (BOX_HEIGHT + GAP_Y))


def _way(source: Node, target: Node) -> Way:
    if abs(source.layer - target.layer) != 1:
        return "bus"
    return "facing" if source.lane == target.lane else "elbow"


def _buses(arrows: list[Arrow], ways: list[Way], nodes: dict[str, Node]) -> dict[int, int]:
    """Which bus each arrow takes that needs one. The longest is the lowest."""
    need = [i for i, way in enumerate(ways) if way == "bus"]
    need.sort(key=lambda i: abs(nodes[arrows[i].source].layer - nodes[arrows[i].target].layer))
    return {i: bus for bus, i in enumerate(need)}


def _ports(
    arrows: list[Arrow], nodes: dict[str, Node], boxes: dict[str, Box]
) -> dict[tuple[int, str], Point]:
    """The point of each arrow's "source" and "target"."""
    sides: dict[tuple[str, Side], list[tuple[tuple[float, ...], int, str]]] = defaultdict(list)
    for i, arrow in enumerate(arrows):
        source, target = nodes[arrow.source], nodes[arrow.target]
        for role, here, there in (("source", source, target), ("target", target, source)):
            end = _end(here, there, i)
            sides[here.kind, end.side].append((end.order, i, role))
    ports = {}
    for (kind, side), ends in sides.items():
        for place, (_, i, role) in enumerate(sorted(ends), start=1):
            ports[i, role] = _on_side(boxes[kind], side, place / (len(ends) + 1))
    return ports


def _end(here: Node, there: Node, index: int) -> _End:
    way, right = _way(here, there), there.layer > here.layer
    if way == "bus" or (way == "elbow" and here.lane < there.lane):
        # What goes to the right leaves at the right; of those, the first is the outermost.
        return _End("bottom", (right, way == "elbow" and right, -index if right else index))
    return _End("right" if right else "left", (there.lane, index))


def _on_side(box: Box, side: Side, share: float) -> Point:
    if side == "bottom":
        return box.x + box.width * share, box.y + box.height
    return box.x + (box.width if side == "right" else 0), box.y + box.height * share


def _facing(start: Point, end: Point, sag: float) -> Route:
    (x, y), (x2, y2) = start, end
    third = (x2 - x) / 3
    path = f"M{x:g} {y:g} C{x + third:g} {y + sag:g} {x2 - third:g} {y2 + sag:g} {x2:g} {y2:g}"
    return Route(path, ((x + x2) / 2, (y + y2) / 2 + sag / 2))


def _elbow(start: Point, end: Point, from_bottom: bool) -> Route:
    """From a bottom to a side, or from a side to a bottom."""
    upper, lower = (start, end) if from_bottom else (end, start)
    corner = (upper[0], lower[1])
    label = ((upper[0] + lower[0]) / 2, lower[1])
    return Route(_rounded([start, corner, end]), label)


def _along_bus(start: Point, end: Point, y: float) -> Route:
    path = _rounded([start, (start[0], y), (end[0], y), end])
    return Route(path, ((start[0] + end[0]) / 2, y))


def _rounded(points: list[Point]) -> str:
    """A line through the points, horizontal and vertical, with round corners."""
    path = f"M{points[0][0]:g} {points[0][1]:g}"
    for before, corner, after in zip(points, points[1:], points[2:], strict=False):
        into, out = _towards(corner, before), _towards(corner, after)
        path += f" L{into[0]:g} {into[1]:g} Q{corner[0]:g} {corner[1]:g} {out[0]:g} {out[1]:g}"
    return path + f" L{points[-1][0]:g} {points[-1][1]:g}"


def _towards(corner: Point, other: Point) -> Point:
    """The point a radius away from the corner, or half the way if that's shorter."""
    dx, dy = other[0] - corner[0], other[1] - corner[1]
    length = abs(dx) + abs(dy)
    share = min(RADIUS / length, 0.5) if length else 0.0
    return corner[0] + dx * share, corner[1] + dy * share


def _frames(graph: Graph, boxes: dict[str, Box]) -> dict[str, Box]:
    """A frame around each unit of several kinds; one around each box if others are between."""
    members: dict[str, list[str]] = {}
    for node in graph.nodes:
        if node.together:
            members.setdefault(", ".join(node.units), []).append(node.kind)
    frames: dict[str, Box] = {}
    for unit, kinds in members.items():
        frame = _around([boxes[kind] for kind in kinds])
        strangers = [box for kind, box in boxes.items() if kind not in kinds]
        if any(_overlap(frame, box) for box in strangers):
            frames |= {f"{unit}: {kind}": _around([boxes[kind]]) for kind in kinds}
        else:
            frames[unit] = frame
    return frames


def _around(boxes: list[Box], space: float = 18) -> Box:
    x, y = min(box.x for box in boxes) - space, min(box.y for box in boxes) - space - 14
    right = max(box.x + box.width for box in boxes) + space
    return Box(x, y, right - x, max(box.y + box.height for box in boxes) + space - y)


def _overlap(a: Box, b: Box) -> bool:
    apart_x = a.x + a.width <= b.x or b.x + b.width <= a.x
    apart_y = a.y + a.height <= b.y or b.y + b.height <= a.y
    return not (apart_x or apart_y)
