"""A headless Chromium, led over the W3C's WebDriver protocol: as much of it as the tests need."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import re
import shutil
import subprocess
import urllib.request
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp

BROWSER, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
_STARTED = re.compile(r"started successfully on port (\d+)")
_WAIT = """
return new Promise((done) => {
  const look = () => {
    let value = null;
    try { value = (CONDITION); } catch {}
    value ? done(value) : requestAnimationFrame(look);
  };
  look();
});
"""


class Browser:
    """One tab. Scripts are bodies of functions, and may return promises."""

    def __init__(self, http: aiohttp.ClientSession, session: str) -> None:
        self._http = http
        self._session = session

    async def command(self, method: str, path: str, body: Any = None) -> Any:
        url = f"/session/{self._session}{path}"
        kwargs = {} if method == "GET" else {"json": body or {}}
        async with self._http.request(method, url, **kwargs) as answer:
            value = (await answer.json())["value"]
        assert answer.status == 200, value
        return value

    async def open(self, url: str) -> None:
        await self.command("POST", "/url", {"url": url})

    async def run(self, script: str, *args: Any) -> Any:
        return await self.command("POST", "/execute/sync", {"script": script, "args": list(args)})

    async def until(self, condition: str) -> Any:
        """The first value of an expression that is true, looked at once a frame."""
        return await self.run(_WAIT.replace("CONDITION", condition))

    async def devtools(self, name: str, **params: Any) -> Any:
        body = {"cmd": name, "params": params}
        return await self.command("POST", "/goog/cdp/execute", body)

    async def look(
        self, width: int, height: int, scheme: str = "light", motion: bool = True
    ) -> None:
        """Size of the window, colour scheme, and whether things may move."""
        await self.devtools(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        features = [
            {"name": "prefers-color-scheme", "value": scheme},
            {"name": "prefers-reduced-motion", "value": "no-preference" if motion else "reduce"},
        ]
        await self.devtools("Emulation.setEmulatedMedia", features=features)

    async def offline(self, gone: bool) -> None:
        """Whether the network is gone."""
        await self.devtools("Network.enable")
        rates = {"latency": 0, "downloadThroughput": -1, "uploadThroughput": -1}
        await self.devtools("Network.emulateNetworkConditions", offline=gone, **rates)

    async def screenshot(self) -> bytes:
        """As a PNG file."""
        return base64.b64decode(await self.command("GET", "/screenshot"))

    async def complaints(self) -> list[str]:
        """What the console has said since it was asked last: errors, broken policies."""
        entries = await self.command("POST", "/se/log", {"type": "browser"})
        return [entry["message"] for entry in entries if entry["level"] == "SEVERE"]


@contextlib.contextmanager
def started(profile: Path) -> Iterator[tuple[str, str]]:
    """The driver's address, and its session: a browser with an empty profile in that folder."""
    assert BROWSER is not None
    assert DRIVER is not None
    driver = subprocess.Popen(
        [DRIVER, "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    with driver:
        try:
            assert driver.stdout is not None
            said = next(filter(None, map(_STARTED.search, driver.stdout)))
            url = f"http://127.0.0.1:{said[1]}"
            session = _ask("POST", f"{url}/session", _wishes(profile))["sessionId"]
            yield url, session
            _ask("DELETE", f"{url}/session/{session}")
        finally:
            driver.terminate()


@contextlib.asynccontextmanager
async def tab(url: str, session: str) -> AsyncIterator[Browser]:
    """The browser, as it is led from one event loop."""
    async with aiohttp.ClientSession(url, timeout=aiohttp.ClientTimeout(60)) as http:
        browser = Browser(http, session)
        await browser.open("about:blank")
        await browser.complaints()
        yield browser
        await browser.open("about:blank")


def _ask(method: str, url: str, body: Any = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(urllib.request.Request(url, data, method=method)) as answer:
        return json.load(answer)["value"]


def _wishes(profile: Path) -> dict[str, Any]:
    arguments = ["--headless=new", f"--user-data-dir={profile}", "--disable-gpu"]
    arguments += ["--disable-dev-shm-usage", "--no-first-run", "--disable-background-networking"]
    if os.geteuid() == 0:
        arguments.append("--no-sandbox")  # Chromium refuses to sandbox what root starts
    options = {"binary": BROWSER, "args": arguments}
    wishes = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
    return {"capabilities": {"alwaysMatch": wishes}}
