"""`ringcast topology`: all that is in actors/topology.py is drawn, in every form, and no more."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringcast.actors import topology
from ringcast.actors.hosts import Part, counts_on, part_of
from ringcast.actors.topology import ActorRow, EdgeRow
from ringcast.frontend.cli.graph import make_graph, place
from ringcast.frontend.cli.graph_routes import Box, lay_out
from ringcast.frontend.cli.graph_svg import draw_svg
from ringcast.frontend.cli.graph_text import draw_text
from ringcast.frontend.cli.main import main
from ringcast.frontend.cli.topology import graph_of
from ringcast.mq.cluster_config import ClusterConfig, ClusterPlace

SVG = "{http://www.w3.org/2000/svg}"
COUNTS = [
    {},
    {"worker": 4},
    {"client": 2},
    {"client": 3, "worker": 8},
    topology.counts_for(replicas=2, ranks=2),
    {**topology.counts_for(replicas=2, ranks=2), topology.LOCKSTEP: 1},
    {"tokenizer": 2, "detokenizer": 3},
]


def status_of(part: Part) -> dict[str, Any]:
    return {
        "actors": [{"name": name, "pid": 4000 + i} for i, name in enumerate(part.instances)],
        "edges": [{"name": channel.name} for channel in part.channels],
    }


def place_of(first: int, num: int, **config: Any) -> ClusterPlace:
    return ClusterPlace(config=ClusterConfig(**config), first=first, num=num, session="")


STATUS = status_of(part_of({"worker": 2, "client": 3}, None))


def texts(element: ET.Element) -> list[str]:
    return [text.text or "" for text in element.iter(f"{SVG}text")]


def groups(svg: ET.Element, style: str) -> list[ET.Element]:
    return [g for g in svg.iter(f"{SVG}g") if style in g.get("class", "").split()]


def count_of(row: ActorRow, counts: dict[str, int]) -> int:
    return counts.get(row.kind, row.count)


def rows_of(counts: dict[str, int]) -> list[ActorRow]:
    """Those that there are any of."""
    return [row for row in topology.ACTORS if count_of(row, counts)]


def edges_of(counts: dict[str, int]) -> list[EdgeRow]:
    kinds = {row.kind for row in rows_of(counts)}
    edges = [edge for edge in topology.EDGES if {edge.source, edge.target} <= kinds]
    return [edge for edge in edges if not edge.lockstep or counts.get(topology.LOCKSTEP)]


def row_of(graph: Any, edge: EdgeRow) -> str:
    """The edge's row, without its words."""
    (line,) = (line for line in draw_text(graph).splitlines() if f" {edge.messages} " in line)
    return line.partition(edge.messages)[0].rstrip()


@pytest.mark.parametrize("counts", COUNTS)
def test_text_has_every_actor_and_edge(counts: dict[str, int]) -> None:
    graph = make_graph(counts, "ring")
    lines = draw_text(graph).splitlines()
    heading = lines[2]
    for row in rows_of(counts):
        assert f"{row.kind} ×{count_of(row, counts)}" in heading
        assert any(line.split()[:2] == [row.kind, row.target] for line in lines)
    drawn = [line for line in lines if "▶" in line or "◀" in line]
    assert len(drawn) == len(edges_of(counts))
    for line, edge in zip(drawn, edges_of(counts), strict=True):
        assert edge.messages in line.split()
        assert edge.fan in line
        assert ("═" in line) == (edge.fan == "broadcast")
    assert max(map(len, lines)) <= (130 if counts.get("coordinator") else 110)


def test_text_arrows_start_and_end_at_their_actors() -> None:
    graph = make_graph({})
    heading = draw_text(graph).splitlines()[2]
    for edge in edges_of({}):
        row = row_of(graph, edge)
        (head,) = (i for i, letter in enumerate(row) if letter in "▶◀")
        start = next(i for i, letter in enumerate(row) if letter in "├┤╞╡")
        end = head + (1 if row[head] == "▶" else -1)
        for kind, at in ((edge.source, start), (edge.target, end)):
            first = f" {heading}".index(f" {kind} ")
            assert first <= at < first + len(f"{kind} ×1")


def test_text_says_how_many_and_over_what() -> None:
    channels = topology.channels({"worker": 4, "client": 2})
    first = draw_text(make_graph({"worker": 4, "client": 2}, "zmq")).splitlines()[0]
    assert first == f"9 processes, {len(channels)} channels, transport: zmq"
    lines = draw_text(make_graph({"worker": 4})).splitlines()
    assert any("SchedulerToWorker" in line and "broadcast to 4" in line for line in lines)
    assert any("WorkerToScheduler" in line and "each × 4" in line for line in lines)


@pytest.mark.parametrize("counts", COUNTS)
def test_svg_has_every_actor_and_edge(counts: dict[str, int]) -> None:
    svg = ET.fromstring(draw_svg(make_graph(counts, "ring")))
    actors = {group.get("data-kind"): group for group in groups(svg, "actor")}
    assert sorted(actors) == sorted(row.kind for row in rows_of(counts))
    for row in rows_of(counts):
        count = count_of(row, counts)
        words = texts(actors[row.kind])
        assert f"{row.kind} ×{count}" in words
        assert row.target.rpartition(":")[2] in words
        assert f"{row.kind}.0" in words[1]
        assert f"{row.kind}.{count - 1}" in words[1]
    edges = {
        (group.get("data-source"), group.get("data-target"), group.get("data-messages")): group
        for group in groups(svg, "edge")
    }
    assert len(edges) == len(edges_of(counts))
    for edge in edges_of(counts):
        group = edges[edge.source, edge.target, edge.messages]
        assert edge.fan in group.get("class", "").split()
        assert edge.messages in texts(group)
        assert group.find(f"{SVG}path") is not None


def test_svg_frames_what_is_restarted_as_one() -> None:
    counts = {"worker": 4, "client": 2}
    graph = make_graph(counts)
    svg = ET.fromstring(draw_svg(graph))
    frames = {group.get("data-unit"): group.find(f"{SVG}rect") for group in groups(svg, "unit")}
    mixed = {
        name: {member.partition(".")[0] for member in members}
        for name, members in topology.units(counts).items()
        if len({member.partition(".")[0] for member in members}) > 1
    }
    assert set(frames) == set(mixed)
    boxes = lay_out(graph).boxes
    for name, kinds in mixed.items():
        rect = frames[name]
        assert rect is not None
        frame = Box(*(float(rect.get(side, "")) for side in ("x", "y", "width", "height")))
        assert {kind for kind, box in boxes.items() if inside(box, frame)} == kinds


def inside(box: Box, frame: Box) -> bool:
    return (
        frame.x <= box.x
        and frame.y <= box.y
        and box.x + box.width <= frame.x + frame.width
        and box.y + box.height <= frame.y + frame.height
    )


def test_svg_needs_nothing_from_outside() -> None:
    text = draw_svg(make_graph({}))
    assert text.count("http") == text.count('xmlns="http://www.w3.org/2000/svg"') == 1
    assert "@import" not in text
    assert "<script" not in text
    assert "prefers-color-scheme: dark" in text
    width, height = (float(ET.fromstring(text).get(side, "")) for side in ("width", "height"))
    drawing = lay_out(make_graph({}))
    frame = Box(0, 0, width, height)
    assert all(inside(box, frame) for box in (*drawing.boxes.values(), *drawing.frames.values()))


def test_arrows_begin_and_end_at_their_boxes() -> None:
    graph = make_graph({"worker": 2})
    drawing = lay_out(graph)
    ends = set()
    for arrow, route in zip(graph.arrows, drawing.routes, strict=True):
        numbers = [float(n) for n in route.path.translate(str.maketrans("MLCQ", "    ")).split()]
        for kind, (x, y) in ((arrow.source, numbers[:2]), (arrow.target, numbers[-2:])):
            box = drawing.boxes[kind]
            assert x in (box.x, box.x + box.width) or y == box.y + box.height
            assert box.x <= x <= box.x + box.width
            assert box.y <= y <= box.y + box.height
            ends.add((x, y))
    assert len(ends) == 2 * len(graph.arrows)


def test_the_pipeline_runs_from_left_to_right() -> None:
    graph = make_graph({})
    layer = {node.kind: node.layer for node in graph.nodes}
    assert layer[topology.EDGES[0].source] == 0
    for arrow in graph.arrows:
        assert arrow.back == (layer[arrow.target] <= layer[arrow.source])
    assert {(a.source, a.target) for a in graph.arrows if not a.back} == {
        ("client", "tokenizer"),
        ("tokenizer", "scheduler"),
        ("scheduler", "worker"),
        ("scheduler", "detokenizer"),
    }


@st.composite
def graphs(draw: st.DrawFn) -> tuple[tuple[ActorRow, ...], tuple[EdgeRow, ...]]:
    kinds = [f"kind{i}" for i in range(draw(st.integers(1, 8)))]
    actors = tuple(
        ActorRow(kind, "module:Class", draw(st.sampled_from(["engine", kind]))) for kind in kinds
    )
    pairs = draw(
        st.lists(
            st.tuples(st.sampled_from(kinds), st.sampled_from(kinds)), max_size=20, unique=True
        )
    )
    return actors, tuple(
        EdgeRow(source, target, f"{source}To{target}", draw(st.sampled_from(["each", "broadcast"])))
        for source, target in pairs
    )


@given(graphs())
def test_any_graph_can_be_drawn(
    rows: tuple[tuple[ActorRow, ...], tuple[EdgeRow, ...]],
) -> None:
    actors, edges = rows
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(topology, "ACTORS", actors)
        patch.setattr(topology, "EDGES", edges)
        graph = make_graph({actors[0].kind: 2})
        svg = ET.fromstring(draw_svg(graph))
        lines = draw_text(graph).splitlines()
    assert len(groups(svg, "actor")) == len(actors)
    assert len(groups(svg, "edge")) == len(edges)
    assert all(any(f" {edge.messages} " in line for line in lines) for edge in edges)
    boxes = lay_out(graph).boxes.values()
    assert all(not touch(a, b) for a, b in itertools.combinations(boxes, 2))


def touch(a: Box, b: Box) -> bool:
    return abs(a.x - b.x) < a.width and abs(a.y - b.y) < a.height


@given(graphs())
def test_a_back_edge_closes_a_cycle(
    rows: tuple[tuple[ActorRow, ...], tuple[EdgeRow, ...]],
) -> None:
    places = place(*rows)
    assert len(set(places.values())) == len(places)
    later = [e for e in rows[1] if places[e.source][0] < places[e.target][0]]
    for edge in rows[1]:
        if edge not in later:
            reached, more = set[str](), {edge.target}
            while more:
                reached |= more
                more = {e.target for e in later if e.source in reached} - reached
            assert edge.source in reached


def test_command_prints_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["topology", "--workers", "4", "--transport", "zmq"]) == 0
    assert capsys.readouterr().out == draw_text(make_graph({"worker": 4}, "zmq")) + "\n"


def test_command_prints_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["topology", "--json", "--clients", "2"]) == 0
    graph = json.loads(capsys.readouterr().out)
    assert sorted(node["kind"] for node in graph["nodes"]) == sorted(
        row.kind for row in rows_of({})
    )
    assert graph["transport"] == "ring"
    names = [channel["name"] for arrow in graph["arrows"] for channel in arrow["channels"]]
    assert sorted(names) == sorted(c.name for c in topology.channels({"client": 2}))
    units = topology.units({"client": 2})
    assert graph["units"] == {name: list(members) for name, members in units.items()}


def test_command_writes_svg(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "graph.svg"
    assert main(["topology", "--svg", str(file)]) == 0
    assert capsys.readouterr().out == ""
    assert main(["topology", "--svg", "-"]) == 0
    assert capsys.readouterr().out == file.read_text() == draw_svg(make_graph({}, "ring"))


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--workers", "0"], "--workers 0: it must be 1 to 64"),
        (["--clients", "65"], "--clients 65: it must be 1 to 64"),
        (["--tokenizer-count", "17"], "--tokenizer-count 17: it must be 1 to 16"),
        (["--svg", "/nowhere/graph.svg"], "--svg /nowhere/graph.svg: No such file or directory"),
        (["--svg", "-", "--json"], "not allowed with"),
        (["--url", "http://127.0.0.1:9", "--workers", "2"], "--url draws what runs there"),
        (["--url", "http://127.0.0.1:9"], "http://127.0.0.1:9"),
    ],
)
def test_mistakes(capsys: pytest.CaptureFixture[str], words: list[str], reason: str) -> None:
    assert main(["topology", *words]) == 2
    assert reason in capsys.readouterr().err


def test_a_running_server_gives_numbers_and_pids(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    graph = graph_of(STATUS)
    assert {unit: tuple(members) for unit, members in graph.units.items()} == topology.units(
        {"worker": 2, "client": 3}
    )
    lines = draw_text(graph).splitlines()
    heading = f"8 processes, {len(topology.channels({'worker': 2, 'client': 3}))} channels"
    assert lines[0] == heading
    for node in graph.nodes:
        (line,) = (line for line in lines if node.target in line)
        assert all(str(pid) in line for pid in node.pids.values())
    svg = ET.fromstring(draw_svg(graph))
    assert all(texts(actor)[-1].startswith("pid 40") for actor in groups(svg, "actor"))

    assert main(["topology", "--url", url]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert any(line.startswith("worker ") and line.endswith(" 17") for line in printed)


@pytest.mark.parametrize(
    ("replicas", "more", "place"),
    [
        (4, {}, place_of(0, 2)),
        (4, {}, place_of(1, 3)),
        (4, {}, place_of(0, 0)),
        (4, {topology.LOCKSTEP: 1}, place_of(0, 2)),
        (4, {topology.LOCKSTEP: 1}, None),
        (1, {}, place_of(0, 1, nnodes=2)),
    ],
)
def test_of_several_hosts_what_is_on_the_server_s_is_drawn(
    replicas: int, more: dict[str, int], place: ClusterPlace | None
) -> None:
    part = part_of(counts_on({**topology.counts_for(replicas, 4), **more}, place), place)
    graph = graph_of(status_of(part))
    assert sorted(n for node in graph.nodes for n in node.instances) == sorted(part.instances)
    drawn = {channel.name for arrow in graph.arrows for channel in arrow.channels}
    assert drawn == {channel.name for channel in part.channels}
    assert {unit: tuple(members) for unit, members in graph.units.items()} == part.units
    assert len(draw_text(graph).splitlines()) > len(graph.arrows)
    assert len(groups(ET.fromstring(draw_svg(graph)), "edge")) == len(graph.arrows)


@pytest.mark.parametrize("option", ["--tensor-parallel-size", "-tp", "--workers"])
def test_workers_by_the_engines_own_option(option: str, capsys: Any) -> None:
    assert main(["topology", option, "2"]) == 0
    said = capsys.readouterr().out
    assert "worker ×2" in said
    assert "broadcast to 2" in said


def test_replicas_by_the_engines_own_option(capsys: Any) -> None:
    assert main(["topology", "-dp", "3", "-tp", "2"]) == 0
    said = capsys.readouterr().out
    assert "scheduler ×3  worker ×6" in said
    assert "coordinator ×1" in said
    assert "broadcast to 2" in said
    assert "as engine.0, engine.1, engine.2" in said
