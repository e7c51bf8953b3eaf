"""The process graph as an SVG drawing that needs nothing from outside: no font, no script.

It has a ground of its own, light or dark as the reader prefers, so that it can stand on any page.
Actors, edges and frames are groups with their facts as data- attributes.
"""

from __future__ import annotations

from xml.etree import ElementTree as ET

from .graph import Arrow, Graph, Node
from .graph_routes import MARGIN, Box, Drawing, Route, lay_out
from .graph_text import summary

_STYLE = """
text { font: 12px system-ui, sans-serif; fill: #1c2733; text-anchor: middle; }
.ground { fill: #ffffff; stroke: #d5dce3; }
.box { fill: #eaf2fb; stroke: #2f6db3; stroke-width: 1.5; }
.frame { fill: none; stroke: #8a6fc0; stroke-width: 1.5; stroke-dasharray: 6 4; }
.frame-name { fill: #6b4fa8; text-anchor: start; }
.title, .name { font-size: 14px; font-weight: 600; }
.title, .legend { text-anchor: start; }
.small { font-size: 11px; fill: #566473; }
.code { font-family: ui-monospace, monospace; font-size: 11px; }
.line { fill: none; stroke: #566473; stroke-width: 1.5; marker-end: url(#arrow); }
.broadcast .line { stroke: #c2570c; stroke-width: 3.5; marker-end: url(#broadcast-arrow); }
.head { fill: #566473; }
.broadcast-head { fill: #c2570c; }
@media (prefers-color-scheme: dark) {
  text { fill: #e3e9f0; }
  .ground { fill: #161c24; stroke: #323c48; }
  .box { fill: #1f3048; stroke: #6ea8e6; }
  .frame { stroke: #a68be0; }
  .frame-name { fill: #bda6ee; }
  .small { fill: #a3b0bd; }
  .line { stroke: #a3b0bd; }
  .head { fill: #a3b0bd; }
  .broadcast .line { stroke: #f0904a; }
  .broadcast-head { fill: #f0904a; }
}
"""


def draw_svg(graph: Graph) -> str:
    """A whole SVG document."""
    drawing = lay_out(graph)
    width, height = f"{drawing.width:g}", f"{drawing.height:g}"
    svg = ET.Element(
        "svg",
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {width} {height}",
        width=width,
        height=height,
        role="img",
    )
    ET.SubElement(svg, "title").text = f"Ringcast's process graph: {summary(graph)}"
    ET.SubElement(svg, "style").text = _STYLE
    _add_heads(svg)
    _add_rect(svg, Box(0.5, 0.5, drawing.width - 1, drawing.height - 1), "ground", 10)
    _add_text(svg, MARGIN - 18, 30, summary(graph), "title")
    for unit, frame in drawing.frames.items():
        _add_frame(svg, unit, frame)
    for arrow, route in zip(graph.arrows, drawing.routes, strict=True):
        _add_arrow(svg, arrow, route)
    for node in graph.nodes:
        _add_node(svg, node, drawing.boxes[node.kind])
    _add_legend(svg, drawing)
    ET.indent(svg)
    return ET.tostring(svg, encoding="unicode") + "\n"


def _add_heads(svg: ET.Element) -> None:
    """The two arrow heads."""
    defs = ET.SubElement(svg, "defs")
    for name, of, size in (("arrow", "head", "9"), ("broadcast-arrow", "broadcast-head", "14")):
        marker = ET.SubElement(
            defs,
            "marker",
            id=name,
            viewBox="0 0 10 10",
            refX="9",
            refY="5",
            markerWidth=size,
            markerHeight=size,
            markerUnits="userSpaceOnUse",
            orient="auto",
        )
        ET.SubElement(marker, "path", {"class": of, "d": "M0 0 L10 5 L0 10 Z"})


def _add_frame(svg: ET.Element, unit: str, frame: Box) -> None:
    group = ET.SubElement(svg, "g", {"class": "unit", "data-unit": unit})
    _add_rect(group, frame, "frame", 12)
    _add_text(group, frame.x + 12, frame.y + 16, f"{unit}: restarted as one", "frame-name")


def _add_arrow(svg: ET.Element, arrow: Arrow, route: Route) -> None:
    group = ET.SubElement(
        svg,
        "g",
        {
            "class": f"edge {arrow.fan}",
            "data-source": arrow.source,
            "data-target": arrow.target,
            "data-messages": arrow.messages,
        },
    )
    ET.SubElement(group, "path", {"class": "line", "d": route.path})
    x, y = route.label
    _add_text(group, x, y - 7, arrow.messages, "code")
    _add_text(group, x, y + 14, arrow.fan_in_words, "small")


def _add_node(svg: ET.Element, node: Node, box: Box) -> None:
    count, pids = len(node.instances), [str(pid) for pid in node.pids.values()]
    facts = {"data-kind": node.kind, "data-count": str(count), "data-units": " ".join(node.units)}
    group = ET.SubElement(svg, "g", {"class": "actor", **facts})
    for behind in range(min(count, 3) - 1, -1, -1):
        back = Box(box.x + 6 * behind, box.y - 6 * behind, box.width - 12 * behind)
        _add_rect(group, back, "box", 8)
    lines = [
        (f"{node.kind} ×{count}", "name"),
        (_in_short(node.instances), "small"),
        (node.target.rpartition(":")[2], "code"),
        (f"pid {_in_short(pids)}" if pids else f"restarted {node.restarted}", "small"),
    ]
    for i, (line, style) in enumerate(lines):
        _add_text(group, box.x + box.width / 2, box.y + 28 + 20 * i, line, style)


def _in_short(words: list[str]) -> str:
    return " ".join(words if len(words) < 3 else [words[0], "…", words[-1]])


def _add_legend(svg: ET.Element, drawing: Drawing) -> None:
    text = "thin: a channel for each pair   ·   thick: a broadcast, one channel that all read"
    _add_text(svg, MARGIN - 18, drawing.height - 16, text, "legend small")


def _add_rect(parent: ET.Element, box: Box, style: str, radius: float) -> None:
    ET.SubElement(
        parent,
        "rect",
        {
            "class": style,
            "x": f"{box.x:g}",
            "y": f"{box.y:g}",
            "width": f"{box.width:g}",
            "height": f"{box.height:g}",
            "rx": f"{radius:g}",
        },
    )


def _add_text(parent: ET.Element, x: float, y: float, text: str, style: str) -> None:
    ET.SubElement(parent, "text", {"class": style, "x": f"{x:g}", "y": f"{y:g}"}).text = text
