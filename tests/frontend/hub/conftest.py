"""Small models on disk, and a catalogue whose package index and converter are local scripts."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save, save_file

from ringcast.frontend.hub import catalogue, gguf_file, wheel

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 8,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
TOKENIZER = {"added_tokens": [], "model": {"vocab": {"a": 0, "<s>": 5, "</s>": 6}}}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The models folder, not made yet, of a cache of this test's own."""
    monkeypatch.setenv("RINGCAST_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "models"


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value))


class MakeModel:
    """Writes model folders, each with one tiny tensor."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def __call__(
        self,
        name: str = "model",
        *,
        weights: bool = True,
        tokenizer: bool = True,
        generation: dict[str, Any] | None = None,
        **config: Any,
    ) -> Path:
        """config: keys of config.json to change; a key set to ... is left out."""
        folder = self._root / name
        folder.mkdir()
        merged = {k: v for k, v in {**CONFIG, **config}.items() if v is not ...}
        write_json(folder / "config.json", merged)
        if weights:
            save_file({"w": np.ones(4, dtype=np.float32)}, folder / "model.safetensors")
        if tokenizer:
            write_json(folder / "tokenizer.json", TOKENIZER)
        if generation is not None:
            write_json(folder / "generation_config.json", generation)
        return folder


@pytest.fixture
def make_model(tmp_path: Path) -> MakeModel:
    return MakeModel(tmp_path)


PIP = """
import shutil, sys
with open({log!r}, "a") as log:
    log.write("pip\\n")
dest, *requirements = sys.argv[sys.argv.index("--dest") + 1 :]
for requirement in requirements:
    print("Collecting", requirement)
    print("Progress 3 of 10")
    name, version = requirement.split("==")
    shutil.copy({folder!r} + "/" + name + "-" + version + "-py3-none-any.whl", dest)
    print("Progress 10 of 10")
"""

CONVERTER = """
import json, os, sys, time
source, out = sys.argv[1:]
with open({log!r}, "a") as log:
    log.write(f"convert {{os.getpid()}}\\n")
print("progress 1 2", flush=True)
with open(os.path.join(out, "config.json"), "w") as file:
    json.dump({config!r}, file)
while os.path.exists({hold!r}):
    time.sleep(0.01)
with open(os.path.join(out, "tokenizer.json"), "w") as file:
    json.dump({tokenizer!r}, file)
if os.path.exists({fail!r}):
    print("Traceback (most recent call last):", file=sys.stderr)
    print("it has no tensors", file=sys.stderr)
    sys.exit(1)
with open(source, "rb") as file, open(os.path.join(out, "model.safetensors"), "wb") as copy:
    copy.write(file.read()[4:])
print("progress 2 2", flush=True)
"""


class FakeWorld:
    """A catalogue of two models: "tiny", and "split" which is the same in two wheels. Files `hold`
    and `fail` make the converter do so.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.hold, self.fail, self.log = folder / "hold", folder / "fail", folder / "log"
        self.gguf = b"GGUF" + save({"w": np.ones(4, dtype=np.float32)})
        self.wheel = folder / "tiny-1-py3-none-any.whl"
        self.entry = self.make_entry("tiny", [self.gguf])
        self.split = self.make_entry("split", [self.gguf[:30], self.gguf[30:]])
        self.pip_script = folder / "pip.py"
        self.converter_script = folder / "converter.py"
        if self.pip_script.exists():  # start_pull comes here too, and another one may run them
            return
        self.pip_script.write_text(PIP.format(log=str(self.log), folder=str(folder)))
        self.converter_script.write_text(
            CONVERTER.format(
                log=str(self.log),
                hold=str(self.hold),
                fail=str(self.fail),
                config=CONFIG,
                tokenizer=TOKENIZER,
            )
        )

    def make_entry(self, name: str, contents: list[bytes]) -> catalogue.CatalogueEntry:
        parts = [self.make_part(f"{name}{n or ''}", data) for n, data in enumerate(contents)]
        file = wheel.PackagedFile(
            name=f"{name}.gguf",
            package=f"{name}==1",
            sha256=hashlib.sha256(b"".join(contents)).hexdigest(),
            parts=tuple(parts),
        )
        return catalogue.CatalogueEntry(
            name=name, file=file, num_parameters=4, size_bytes=20, license="Apache-2.0"
        )

    def make_part(self, name: str, data: bytes) -> wheel.WheelPart:
        path, member = self.folder / f"{name}-1-py3-none-any.whl", f"{name}/{name}.gguf"
        if not path.exists():
            with zipfile.ZipFile(path, "w") as archive:
                archive.writestr(member, data)
        return wheel.WheelPart(
            requirement=f"{name}==1",
            wheel=path.name,
            num_bytes=10,
            wheel_sha256=hashlib.sha256(path.read_bytes()).hexdigest(),
            member=member,
        )

    def install(self) -> None:
        """Put it in the place of the real catalogue, pip and converter of this process."""
        catalogue.CATALOGUE = {"tiny": self.entry, "split": self.split}
        wheel.PIP = (sys.executable, "-S", str(self.pip_script))
        gguf_file.CONVERTER = (sys.executable, "-S", str(self.converter_script))

    def start_pull(self) -> subprocess.Popen[str]:
        """A process of its own that pulls "tiny" in this world; it prints the folder."""
        lines = (
            "import importlib.util, pathlib",
            f"spec = importlib.util.spec_from_file_location('world', {__file__!r})",
            "module = importlib.util.module_from_spec(spec)",
            "spec.loader.exec_module(module)",
            f"module.FakeWorld(pathlib.Path({str(self.folder)!r})).install()",
            "print(module.catalogue.pull('tiny'))",
        )
        command = [sys.executable, "-c", "\n".join(lines)]
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    def calls(self, what: str) -> list[str]:
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        return [line for line in lines if line.startswith(what)]


@pytest.fixture
def world(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> FakeWorld:
    for module, name in (
        (catalogue, "CATALOGUE"),
        (wheel, "PIP"),
        (gguf_file, "CONVERTER"),
    ):
        monkeypatch.setattr(module, name, getattr(module, name))
    folder = tmp_path / "world"
    folder.mkdir()
    world = FakeWorld(folder)
    world.install()
    return world
