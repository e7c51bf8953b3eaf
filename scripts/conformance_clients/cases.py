"""What the clients' programs share: servers, cases, and how scripts/conformance hears of them.

A case is a function without arguments, which raises if something is wrong. A refusal is one, too:
it holds that the server says no, and as clearly as documented. A program ends with `run()`.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import time
import traceback
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

TOLD: dict[str, Any] = json.loads(os.environ["CONFORMANCE"])
KEY: str = TOLD["key"]
MODEL: str = TOLD["model"]
EMBEDDING_MODEL: str = TOLD["embedding_model"]
TOKENIZER: str = TOLD["tokenizer"]
WORK = Path(TOLD["work"])
_PATIENCE = 20.0  # seconds

_cases: list[tuple[str, str, Callable[[], Any]]] = []


def url(server: str, path: str = "/v1") -> str:
    return TOLD["servers"][server] + path


def case(name: str) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    return _registered(name, "passed")


def refusal(name: str) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    return _registered(name, "refused")


def _registered(name: str, verdict: str) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    def register(function: Callable[[], Any]) -> Callable[[], Any]:
        _cases.append((name, verdict, function))
        return function

    return register


def get(server: str, path: str) -> Any:
    request = urllib.request.Request(url(server, path), headers={"Authorization": f"Bearer {KEY}"})
    with urllib.request.urlopen(request, timeout=_PATIENCE) as answer:
        return json.load(answer)


def wait_idle(server: str) -> None:
    """Until the server has no request open."""
    deadline = time.monotonic() + _PATIENCE
    while (load := get(server, "/load")["server_load"]) > 0:
        assert time.monotonic() < deadline, f"{load} requests are still open"
        time.sleep(0.02)


def run() -> None:
    with Path(TOLD["results"]).open("w") as results:
        for name, verdict, function in _cases:
            about = ""
            try:
                if inspect.iscoroutinefunction(function):
                    asyncio.run(function())
                else:
                    function()
            except Exception:
                verdict, about = "failed", traceback.format_exc()[-3000:]
            results.write(json.dumps({"name": name, "verdict": verdict, "about": about}) + "\n")
            results.flush()
