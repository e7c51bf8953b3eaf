"""The launcher's process as the master holds it, with a program in its place that has no Ray."""

from __future__ import annotations

import asyncio
import os

import pytest

from ringcast.frontend.launch.launcher import LauncherError, RayLauncher
from ringcast.mq.errors import ConfigError
from ringcast.mq.launching import Launch, Place

# What it does is in the order's address: words that are done one after the other. Its second life
# does the words after "|".
PROGRAM = """
import asyncio, os, socket, sys, pathlib
from ringcast.actors.control import Control
from ringcast.mq.launching import *

async def main():
    loop = asyncio.get_running_loop()
    heard = asyncio.Queue()
    control = Control(socket.socket(fileno=int(sys.argv[1])), MasterToLauncher)
    def take():
        try:
            while (packet := control.receive()) is not None:
                heard.put_nowait(packet[0])
        except EOFError:
            loop.remove_reader(control.fileno())
            heard.put_nowait(None)
    loop.add_reader(control.fileno(), take)
    order = await heard.get()
    lives = pathlib.Path(__file__).with_name("lives")
    lives.write_text(lives.read_text() + "." if lives.exists() else ".")
    for word in order.ray_address.split("|")[len(lives.read_text()) - 1].split():
        match word:
            case "notice": control.send(Notice("waits"))
            case "placed": control.send(Placed("10.0.0.9"))
            case "no-ray": control.send(CannotLaunch("no ray", True))
            case "no-room": control.send(CannotLaunch("no room", False))
            case "launched":
                launch = await heard.get()
                control.send(Notice(f"{launch.options} {launch.variables} {len(launch.secret)}"))
            case "ended": control.send(HostEnded(1, "no model", True, 2.0))
            case "die": print("why", file=sys.stderr, flush=True); os._exit(3)
            case "linger":
                assert await heard.get() is None
                pathlib.Path(__file__).with_name("tidied").touch()

asyncio.run(main())
"""


class Owner:
    def __init__(self) -> None:
        self.heard: asyncio.Queue[tuple] = asyncio.Queue()

    def notice(self, text: str) -> None:
        self.heard.put_nowait(("notice", text))

    def cannot_launch(self, error: str, user_error: bool) -> None:
        self.heard.put_nowait(("cannot launch", error, user_error))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "no_ray_at_all.py").write_text(PROGRAM)
    paths = [str(tmp_path), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
    return tmp_path


def launcher(owner: Owner, words: str) -> RayLauncher:
    return RayLauncher(Place(words, [1], {"CPU": 1.0}, 5.0), owner, "no_ray_at_all")


LAUNCH = Launch({"model": "m"}, "s" * 64, {"A": "b"})


def test_what_prevents_a_start_is_raised(folder):
    async def run() -> None:
        for words, error, text in (
            ("no-ray", ConfigError, "^no ray$"),
            (
                "|notice die",
                LauncherError,
                "(?s)launcher of replicas on Ray died: exit status 3.*why",
            ),
        ):
            owner = Owner()
            async with launcher(owner, words) as made:
                with pytest.raises(error, match=text):
                    await made.place()
            if error is LauncherError:
                assert owner.heard.get_nowait() == ("notice", "waits")

    asyncio.run(run())


def test_it_launches_tells_and_comes_back_after_a_death(folder, monkeypatch):
    monkeypatch.setattr("ringcast.frontend.launch.launcher._FIRST_REST", 0.01)

    async def run() -> None:
        owner = Owner()
        async with launcher(owner, "placed launched ended die|placed launched linger") as made:
            assert (await made.place()).address == "10.0.0.9"
            keeping = asyncio.create_task(made.keep(LAUNCH))
            said = [await owner.heard.get() for _ in range(6)]
            keeping.cancel()
        launched = ("notice", "{'model': 'm'} {'A': 'b'} 64")
        died = "the launcher of replicas on Ray died: exit status 3\nwhy"
        assert said == [
            launched,
            ("cannot launch", "no model", True),
            ("notice", "no model\nIt is started again in 2 s"),
            ("cannot launch", died, False),
            ("notice", f"{died}\nRay is tried again in 0.01 s"),
            launched,
        ]
        assert (folder / "tidied").exists()

    asyncio.run(run())


def test_without_ray_the_extra_is_named(tmp_path, monkeypatch):
    """By the real launcher."""
    (tmp_path / "ray.py").write_text("raise ModuleNotFoundError(\"No module named 'ray'\")")
    paths = [str(tmp_path), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))

    async def run() -> None:
        async with RayLauncher(Place("auto", [0], {"CPU": 1.0}, 60.0), Owner()) as made:
            with pytest.raises(ConfigError, match=r"'ray'; pip install 'ringcast\[ray\]'"):
                await made.place()

    asyncio.run(run())
