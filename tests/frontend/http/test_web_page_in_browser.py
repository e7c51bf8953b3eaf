"""The page at /, in a headless Chromium."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import webdriver
from webdriver import Browser

from ringcast.frontend.http.app import make_app
from ringcast.frontend.http.http_server import HttpServer
from ringcast.frontend.http.listener import bind
from ringcast.frontend.metrics.recorder import Recorder
from ringcast.mq import supervision
from ringcast.mq.config import build
from ringcast.mq.messages import ErrorInfo
from ringcast.mq.server_config import ServerConfig

pytestmark = pytest.mark.browser

FIRST = "client.0>tokenizer.0"
SEND = """
document.getElementById("prompt").value = arguments[0];
document.getElementById("composer").requestSubmit();
"""
ANSWER = "document.querySelector('.assistant:last-of-type .text').textContent"
DONE = "document.querySelector('.assistant:last-of-type .facts')?.textContent"


@dataclasses.dataclass
class Page:
    """A server with the page, and a browser that shows it. status: what the server answers."""

    url: str
    tab: Browser
    status: supervision.Status


def status_of(engines: int) -> supervision.Status:
    names = ["client.0", "tokenizer.0", "detokenizer.0"]
    edges = [FIRST, "tokenizer.0>client.0", "detokenizer.0>client.0"]
    for i in range(engines):
        scheduler, worker = f"scheduler.{i}", f"worker.{i}"
        names += [scheduler, worker]
        edges += [f"tokenizer.0>{scheduler}", f"{scheduler}>workers", f"{worker}>{scheduler}"]
        edges += [f"{scheduler}>detokenizer.0", f"detokenizer.0>{scheduler}"]
    statistics = {"running": 3.0, "waiting": 2.0, "kv_usage": 0.25}
    return supervision.Status(
        [supervision.ActorStatus(name, i, "ready", 1.0, 10**8, 0) for i, name in enumerate(names)],
        [supervision.EdgeStatus(name, 1000, 100, 5) for name in edges],
        {f"scheduler.0.{name}": value for name, value in statistics.items()},
    )


def roles_of(request: Any) -> list[str]:
    return [message["role"] for message in json.loads(request.prompt.messages)]


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    with webdriver.started(tmp_path_factory.mktemp("profile")) as session:
        yield session


@pytest.fixture
def show(driver: tuple[str, str], client: Any, engine: Any, spec: Any) -> Any:
    """show(engines, **ServerConfig's options): the page, on a wide screen."""

    @contextlib.asynccontextmanager
    async def showing(engines: int = 1, **options: Any) -> AsyncIterator[Page]:
        config = build(ServerConfig, options)
        client.observer = recorder = Recorder()

        async def status() -> supervision.Status:
            return page.status

        server = HttpServer(make_app(client, spec, config, status, recorder), config)
        url = await server.open(bind("127.0.0.1", 0))
        try:
            async with webdriver.tab(*driver) as tab:
                page = Page(url, tab, status_of(engines))
                await tab.look(1300, 900, motion=False)
                await tab.open(url)
                yield page
            engine.hold = None
            await client.wait_idle()
            await engine.wait_idle()
        finally:
            await server.close()

    return showing


async def test_the_live_picture(show: Any) -> None:
    async with show() as page:
        assert await page.tab.until("document.querySelectorAll('.ready .box').length === 5")
        tiles = await page.tab.run("return document.getElementById('tiles').innerText")
        assert "3 + 2 waiting" in tiles
        assert "25 %" in tiles
        assert await page.tab.run("return document.querySelectorAll('.ring').length") == 8
        label = "document.querySelector('.graph svg').getAttribute('aria-label')"
        assert await page.tab.run(f"return {label}") == (
            "5 processes, 8 rings between them; all ready"
        )
        actors, edges = page.status.actors, page.status.edges
        actors[4] = supervision.ActorStatus("worker.0", 99, "dead", 0.0, 0, 2)
        edges[0] = supervision.EdgeStatus(FIRST, 1000, 990, 9, 1.5, "tokenizer.0 has 990 bytes")
        assert await page.tab.until("document.querySelector('.dead .box')")
        assert await page.tab.until("document.querySelector('.ring.full')")
        assert (await page.tab.run(f"return {label}")).endswith(
            "worker.0 dead; full: client.0>tokenizer.0"
        )
        note = await page.tab.run("return document.getElementById('live-note').textContent")
        assert note == "client.0>tokenizer.0 full for 1.5 s: tokenizer.0 has 990 bytes"
        assert await page.tab.run("return document.getElementById('link-state').innerText") == (
            "recovering"
        )
        assert await page.tab.complaints() == []


@pytest.mark.parametrize(("engines", "arrows"), [(2, 3 + 2 * 5), (4, 3 + 3 + 4 * 2)])
async def test_replicas_stand_apart(show: Any, engines: int, arrows: int) -> None:
    """Each in a frame; where there are many, one arrow leads to all of them."""
    overlaps = """
    const all = [...document.querySelectorAll('.box')].map((e) => e.getBBox());
    return all.flatMap((a, i) => all.slice(i + 1).filter((b) => a.x < b.x + b.width
        && b.x < a.x + a.width && a.y < b.y + b.height && b.y < a.y + a.height)).length;
    """
    labels = "[...document.querySelectorAll('.frame-label')].map((e) => e.textContent)"
    shape = """(({ width, height }) => width > height)(
        document.querySelector('.graph svg').viewBox.baseVal)"""
    async with show(engines) as page:
        for width, wide in ((1300, "true"), (400, "false")):
            await page.tab.look(width, 900)
            assert await page.tab.until(f"String({shape}) === '{wide}'")
            count = "return document.querySelectorAll('.graph .box').length"
            assert await page.tab.run(count) == 3 + 2 * engines
            assert await page.tab.run("return document.querySelectorAll('.ring').length") == arrows
            assert await page.tab.run(overlaps) == 0
            frames = [label for label in await page.tab.run(f"return {labels}") if label]
            assert frames == [f"engine {i}" for i in range(engines)]


async def test_a_chat(show: Any, engine: Any) -> None:
    async with show() as page:
        assert await page.tab.until("document.getElementById('model').value") == "fake-model"
        fields = {"temperature": "0.5", "top-p": "0.9", "max-tokens": "5", "seed": "7"}
        for name, value in {**fields, "system": "Be brief."}.items():
            await page.tab.run(
                "document.getElementById(arguments[0]).value = arguments[1]", name, value
            )
        await page.tab.run(SEND, "hi")
        facts = await page.tab.until(DONE)
        assert facts.startswith("5 tokens")
        assert facts.endswith("complete")
        assert await page.tab.run(f"return {ANSWER}") == "".join(engine.words)
        (asked,) = engine.generated
        assert roles_of(asked) == ["system", "user"]
        params = asked.params
        assert (params.temperature, params.top_p, params.max_tokens, params.seed) == (
            0.5,
            0.9,
            5,
            7,
        )
        await page.tab.run(SEND, "and then?")
        await page.tab.until("document.querySelectorAll('.facts').length === 2")
        assert roles_of(engine.generated[1]) == ["system", "user", "assistant", "user"]
        assert await page.tab.complaints() == []


async def test_tokens_can_be_looked_at(show: Any) -> None:
    async with show() as page:
        await page.tab.run(SEND, "hi")
        await page.tab.until(DONE)
        tokens = "[...document.querySelectorAll('.token')].map((e) => e.textContent)"
        assert await page.tab.run(f"return {tokens}") == ["Hello", ",", " wörld", " 🌍", "!"]
        await page.tab.run("document.querySelectorAll('.token')[2].click()")
        shown = "document.getElementById('inspector').innerText"
        assert "␣wörld" in await page.tab.run(f"return {shown}")
        assert await page.tab.run("return document.querySelectorAll('.likely li').length") >= 2
        press = """
        const event = new KeyboardEvent("keydown", { key: "ArrowRight", cancelable: true });
        document.querySelector(".assistant .text").dispatchEvent(event);
        """
        await page.tab.run(press)
        assert "␣🌍" in await page.tab.run(f"return {shown}")


async def test_stop(show: Any, engine: Any, until: Any) -> None:
    engine.hold = 2
    async with show() as page:
        await page.tab.run(SEND, "hi")
        await page.tab.until("document.querySelectorAll('.token').length === 2")
        await page.tab.run("document.getElementById('stop').click()")
        assert (await page.tab.until(DONE)).endswith("stopped")
        await until(lambda: engine.aborted)
        assert await page.tab.run("return document.getElementById('send').hidden") is False


async def test_errors_are_said_in_words(show: Any, engine: Any) -> None:
    engine.reject = ErrorInfo("the prompt is <b>too long</b>", 400)
    error = "document.querySelector('.assistant:last-of-type .error')?.textContent"
    async with show() as page:
        await page.tab.run(SEND, "hi")
        assert await page.tab.until(error) == "the prompt is <b>too long</b>"
        assert await page.tab.run("return document.getElementById('prompt').value") == "hi"
        engine.reject, engine.fail = None, ErrorInfo("the engine broke", 500)
        await page.tab.run(SEND, "hi")
        await page.tab.until("document.querySelectorAll('.error').length === 2")
        assert await page.tab.run(f"return {error}") == "the engine broke"


async def test_what_a_model_says_is_never_html(show: Any, engine: Any) -> None:
    engine.words = ["<img src=x ", "onerror=alert(1)>", "<b>bold</b>", "&amp;"]
    async with show() as page:
        await page.tab.run(SEND, "<i>me</i>")
        await page.tab.until(DONE)
        assert await page.tab.run(f"return {ANSWER}") == "".join(engine.words)
        made = "document.querySelectorAll('#messages img, #messages b, #messages i').length"
        assert await page.tab.run(f"return {made}") == 0


async def test_a_key_is_asked_for(show: Any) -> None:
    give = """
    document.getElementById("key").value = arguments[0];
    document.getElementById("key-form").requestSubmit();
    """
    note = "document.getElementById('key-note').textContent"
    form = "document.getElementById('key-form').hidden"
    async with show(api_key=["the-key"]) as page:
        assert await page.tab.until(f"!{form}")
        await page.tab.run(give, "wrong")
        await page.tab.until(f"!{form} && {note}.includes('none of this server')")
        await page.tab.run(give, "the-key")
        assert await page.tab.until("document.querySelectorAll('.box').length === 5")
        assert await page.tab.run(f"return {form}")
        assert await page.tab.run("return localStorage.length + document.cookie.length") == 0
        await page.tab.run(SEND, "hi")
        assert (await page.tab.until(DONE)).endswith("complete")


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_phones_and_colour_schemes(show: Any, scheme: str) -> None:
    async with show() as page:
        await page.tab.look(380, 800, scheme)
        await page.tab.until("document.querySelectorAll('.box').length === 5")
        await page.tab.run(SEND, "hi " + "long" * 50)
        await page.tab.until(DONE)
        assert await page.tab.run("return document.documentElement.scrollWidth") <= 380
        ground = await page.tab.run(
            "return getComputedStyle(document.body.parentElement).backgroundColor"
        )
        brightness = sum(int(part) for part in ground.strip("rgb()").split(","))
        assert (brightness > 3 * 128) == (scheme == "light")


async def test_what_moves_can_be_stilled(show: Any) -> None:
    moving = "document.getAnimations().filter((a) => a.playState === 'running').length"
    async with show() as page:
        page.status.edges[0] = supervision.EdgeStatus(FIRST, 1000, 10, 0)
        await page.tab.until("document.querySelectorAll('.box').length === 5")
        page.status.edges[0] = supervision.EdgeStatus(FIRST, 1000, 10, 10**6)
        await page.tab.until("document.querySelector('.arrow.moving')")
        assert await page.tab.run(f"return {moving}") == 0
        await page.tab.look(1300, 900, motion=True)
        assert await page.tab.until(moving)


async def test_a_server_that_has_gone(show: Any) -> None:
    async with show() as page:
        await page.tab.until("document.querySelectorAll('.box').length === 5")
        await page.tab.offline(True)
        state = "document.getElementById('link-state').textContent"
        await page.tab.until(f"{state} === 'not answering'")
        assert await page.tab.run("return document.querySelector('.graph.stale') !== null")
        await page.tab.offline(False)
        await page.tab.until(f"{state} === 'live'")
