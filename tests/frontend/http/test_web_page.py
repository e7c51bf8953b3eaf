"""The page at /, without a browser: how its files are served, and what they may hold."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import ringcast
from ringcast.actors import topology
from ringcast.actors.hosts import part_of
from ringcast.frontend.http.web_page import NAMES, PATHS
from ringcast.mq.cluster_config import ClusterConfig, ClusterPlace

FOLDER = Path(ringcast.__file__).parent / "frontend/http/page"
TYPES = {
    "html": "text/html",
    "css": "text/css",
    "js": "text/javascript",
    "svg": "image/svg+xml",
}
TEXTS = ("text", "muted", "accent", "good", "warn", "bad")
GROUNDS = ("card", "page")
FRAMES = """
const { layOut } = await import(process.argv[1]);
const { boxes, frames } = layOut(...JSON.parse(process.argv[2]));
const inside = (frame) => ([, { x, y }]) => x > frame.x && x < frame.x + frame.width
    && y > frame.y && y < frame.y + frame.height;
const names = (frame) => [...boxes].filter(inside(frame)).map(([name]) => name).sort();
console.log(JSON.stringify(frames.map((frame) => [frame.label, names(frame)])));
"""


def test_every_file_of_the_folder_is_served() -> None:
    assert sorted(NAMES) == sorted(path.name for path in FOLDER.iterdir())


async def test_headers(serve: Any) -> None:
    async with serve() as server:
        for path in PATHS:
            async with server.http.get(path) as answer:
                assert answer.status == 200
                name = path.removeprefix("/page/") if path != "/" else "index.html"
                assert await answer.read() == (FOLDER / name).read_bytes()
                headers = answer.headers
            assert headers["Content-Type"] == TYPES[name.rpartition(".")[2]] + "; charset=utf-8"
            policy = headers["Content-Security-Policy"].split("; ")
            assert policy[0] == "default-src 'none'"
            assert {rule.split()[1] for rule in policy} == {"'none'", "'self'"}
            assert all(len(rule.split()) == 2 for rule in policy)
            assert headers["X-Content-Type-Options"] == "nosniff"
            assert headers["Referrer-Policy"] == "no-referrer"
            assert headers["Cache-Control"] == "no-cache"


async def test_what_a_browser_has_it_is_not_sent_again(serve: Any) -> None:
    async with serve() as server:
        async with server.http.get("/page/main.js") as answer:
            tag = answer.headers["ETag"]
        async with server.http.get("/page/main.js", headers={"If-None-Match": tag}) as answer:
            assert (answer.status, await answer.read()) == (304, b"")
            assert answer.headers["ETag"] == tag
        other = {"If-None-Match": '"another"'}
        async with server.http.get("/page/main.js", headers=other) as answer:
            assert answer.status == 200
        async with server.http.head("/") as answer:
            assert answer.status == 200


async def test_the_page_is_open_and_its_data_are_not(serve: Any) -> None:
    async with serve(api_key=["the-key"]) as server:
        for path in PATHS:
            async with server.http.get(path) as answer:
                assert answer.status == 200
        for path in ("/status", "/v1/models", "/page/other.js", "/page/"):
            async with server.http.get(path) as answer:
                assert answer.status == 401


async def test_its_files_are_no_part_of_the_api(serve: Any) -> None:
    async with serve() as server, server.http.get("/openapi.json") as answer:
        assert not PATHS & (await answer.json())["paths"].keys()


async def test_it_can_be_left_out(serve: Any) -> None:
    async with serve(disable_page=True) as server:
        for path in PATHS:
            async with server.http.get(path) as answer:
                assert answer.status == 404
        async with server.http.get("/docs") as answer:
            assert answer.status == 200


def test_nothing_comes_from_elsewhere_and_no_text_becomes_html() -> None:
    for path in FOLDER.iterdir():
        text = path.read_text().replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"https?:|//[a-z]+\.|@import|url\((?!#)", text), path
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", text
        ), path
        assert not re.search(r"<script>|<style|\sstyle=|\son[a-z]+=", text), path


def test_what_files_name_is_served() -> None:
    index = (FOLDER / "index.html").read_text()
    named = set(re.findall(r'(?:src|href)="(page/[^"]+)"', index))
    for path in FOLDER.glob("*.js"):
        named |= {f"page/{name}" for name in re.findall(r'from "\./([^"]+)"', path.read_text())}
    assert {f"/{name}" for name in named} | {"/"} == PATHS
    ids = set(re.findall(r'\bid="([^"]+)"', index))
    for path in FOLDER.glob("*.js"):
        assert set(re.findall(r'byId\("([^"]+)"\)', path.read_text())) <= ids, path


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
@pytest.mark.parametrize(("first", "ranks"), [(0, 1), (1, 2)])
def test_workers_stand_in_their_engine_s_frame(tmp_path: Path, first: int, ranks: int) -> None:
    """Also where another host has the workers of a replica."""
    place = ClusterPlace(config=ClusterConfig(), first=first, num=1, session="")
    part = part_of(topology.counts_for(2, ranks), place)
    module = tmp_path / "layout.mjs"
    module.write_text((FOLDER / "layout.js").read_text())
    graph = [part.instances, [channel.name for channel in part.channels], False]
    command = ["node", "--input-type=module", "-e", FRAMES, str(module), json.dumps(graph)]
    frames = json.loads(subprocess.run(command, capture_output=True, check=True, timeout=60).stdout)
    workers = [f"worker.{first * ranks + rank}" for rank in range(ranks)]
    expected = [[f"engine {engine}", [f"scheduler.{engine}"]] for engine in range(2)]
    expected[first][1] += workers
    assert frames == expected


def test_every_field_has_a_label() -> None:
    index = (FOLDER / "index.html").read_text()
    for field, name in re.findall(r'<(?:input|select|textarea) id="(([^"]+))"', index):
        labelled = re.search(rf'<label[^>]*>[^\n]*id="{name}"', index)
        assert labelled or f'for="{name}"' in index, field


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_texts_can_be_read(scheme: str) -> None:
    """Contrast as WCAG 2 has it: 4.5 for text of any size."""
    light, dark = re.findall(r":root \{(.*?)\}", (FOLDER / "style.css").read_text(), re.DOTALL)[:2]
    colours = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", light if scheme == "light" else dark))
    pairs = [(text, ground) for text in TEXTS for ground in GROUNDS]
    pairs += [("text", "sunken"), ("muted", "sunken"), ("on-accent", "accent")]
    for text, ground in pairs:
        lighter, darker = sorted(
            (luminance(colours[text]), luminance(colours[ground])), reverse=True
        )
        assert (lighter + 0.05) / (darker + 0.05) >= 4.5, (text, ground)


def luminance(colour: str) -> float:
    """Relative luminance of #rrggbb, 0 to 1."""
    shares = [int(colour[a:b], 16) / 255 for a, b in pairwise((1, 3, 5, 7))]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in shares]
    return sum(c * weight for c, weight in zip(linear, (0.2126, 0.7152, 0.0722), strict=True))
