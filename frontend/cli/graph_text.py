"""The process graph as text: a line down for each kind of actor, a row for each edge.

Read it like a sequence diagram. The rows are in topology.py's order, which is the way of a request.
A double line is a broadcast: one channel that all instances read.
"""

from __future__ import annotations

from .graph import Arrow, Graph, Node

_GAP = 2  # spaces between headings


def draw_text(graph: Graph) -> str:
    """Lines of at most about 90 characters with the actors there are now; no trailing newline."""
    headings = [f"{node.kind} ×{len(node.instances)}" for node in graph.nodes]
    columns = _columns(headings)
    column = {node.kind: at for node, at in zip(graph.nodes, columns, strict=True)}
    width = columns[-1] + 1 + len(headings[-1]) // 2
    messages = max((len(arrow.messages) for arrow in graph.arrows), default=0)
    lines = [summary(graph), "", _heading(headings, columns)]
    for arrow in graph.arrows:
        row = _row(arrow, column, width)
        lines.append(f"{row}  {arrow.messages:{messages}}  {arrow.fan_in_words}")
    lines += ["", *_table(graph.nodes)]
    return "\n".join(lines)


def summary(graph: Graph) -> str:
    """How many of what there are, in one line."""
    transport = f", transport: {graph.transport}" if graph.transport else ""
    return (
        f"{_count(graph.num_processes, 'process', 'es')}, "
        f"{_count(graph.num_channels, 'channel', 's')}{transport}"
    )


def _count(number: int, noun: str, plural: str) -> str:
    return f"{number} {noun}{plural if number != 1 else ''}"


def _columns(headings: list[str]) -> list[int]:
    """Where each heading's middle is, so that they stand beside each other."""
    columns, end = [], 0
    for heading in headings:
        columns.append(end + len(heading) // 2)
        end += len(heading) + _GAP
    return columns


def _heading(headings: list[str], columns: list[int]) -> str:
    line = ""
    for heading, middle in zip(headings, columns, strict=True):
        line = line.ljust(middle - len(heading) // 2) + heading
    return line


def _row(arrow: Arrow, column: dict[str, int], width: int) -> str:
    """The lines down, with the arrow across them."""
    row = [" "] * width
    for at in column.values():
        row[at] = "│"
    start, end = column[arrow.source], column[arrow.target]
    broadcast, right = arrow.fan == "broadcast", end > start
    for at in range(min(start, end) + 1, max(start, end)):
        crossed = row[at] == "│"
        row[at] = ("╪" if crossed else "═") if broadcast else ("┼" if crossed else "─")
    row[start] = ("╞" if right else "╡") if broadcast else ("├" if right else "┤")
    row[end + (-1 if right else 1)] = "▶" if right else "◀"
    return "".join(row)


def _table(nodes: list[Node]) -> list[str]:
    rows = [
        ("actor", "class", "restarted", "pid" if any(node.pids for node in nodes) else ""),
        *((node.kind, node.target, node.restarted, _pids(node)) for node in nodes),
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


def _pids(node: Node) -> str:
    return ", ".join(str(pid) for pid in node.pids.values())
