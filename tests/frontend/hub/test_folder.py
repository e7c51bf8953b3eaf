"""Model folders: which files there must be, and what is said when they are not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from ringcast.frontend.hub.folder import read_config, require_tokenizer, require_weights
from ringcast.mq.errors import ModelLoadError


def write_shards(folder: Path, *names: str) -> None:
    for name in names:
        save_file({name: np.ones(3, dtype=np.float32)}, folder / name)
    index = {"weight_map": {f"layer.{name}": name for name in names}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def test_single_file_and_shards_are_whole(make_model: Any) -> None:
    require_weights(make_model("single"))
    sharded = make_model("sharded", weights=False)
    write_shards(sharded, "model-1.safetensors", "model-2.safetensors")
    require_weights(sharded)


def test_missing_shard_is_named(make_model: Any) -> None:
    folder = make_model(weights=False)
    write_shards(folder, "model-1.safetensors", "model-2.safetensors")
    (folder / "model-2.safetensors").unlink()
    with pytest.raises(ModelLoadError, match=r"1 of 2 weight files .*: model-2\.safetensors"):
        require_weights(folder)


def test_index_without_map(make_model: Any) -> None:
    folder = make_model()
    (folder / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ModelLoadError, match="has no weight_map"):
        require_weights(folder)


def test_no_weights(make_model: Any) -> None:
    folder = make_model(weights=False)
    expected = r"no weights in .*: neither model\.safetensors\.index\.json nor \*\.safetensors"
    with pytest.raises(ModelLoadError, match=expected):
        require_weights(folder)
    (folder / "pytorch_model.bin").touch()
    with pytest.raises(ModelLoadError, match=r"it holds pytorch_model\.bin \(a pickle"):
        require_weights(folder)


def test_truncated_at_every_length(make_model: Any) -> None:
    folder = make_model()
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    for length in range(len(whole)):
        file.write_bytes(whole[:length])
        with pytest.raises(ModelLoadError, match=r"truncated|no safetensors file"):
            require_weights(folder)
    file.write_bytes(whole + b"!")
    with pytest.raises(ModelLoadError, match=f"{len(whole) + 1} bytes, but .* {len(whole)}"):
        require_weights(folder)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "git lfs pull"),
        (b"PK\x03\x04 something else entirely", "no safetensors file"),
        (b"\x04" + b"\0" * 7 + b"nope", "its header is damaged"),
        (b'\x08\0\0\0\0\0\0\0{"a": 1}', "its header is damaged"),
    ],
)
def test_foreign_weights(make_model: Any, content: bytes, reason: str) -> None:
    folder = make_model()
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(ModelLoadError, match=reason):
        require_weights(folder)


def test_missing_config(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=rf"no config\.json in {tmp_path}; a model's folder"):
        read_config(tmp_path)
    (tmp_path / "some.gguf").touch()
    with pytest.raises(ModelLoadError, match=rf"give its own path: {tmp_path}/some\.gguf"):
        read_config(tmp_path)


@pytest.mark.parametrize(
    ("content", "reason"), [("{", "cannot read"), ("[1]", "holds a list, not a JSON object")]
)
def test_damaged_config(make_model: Any, content: str, reason: str) -> None:
    folder = make_model()
    (folder / "config.json").write_text(content)
    with pytest.raises(ModelLoadError, match=reason):
        read_config(folder)


def test_missing_tokenizer(make_model: Any) -> None:
    require_tokenizer(make_model("with"), "")
    folder = make_model("without", tokenizer=False)
    with pytest.raises(ModelLoadError, match=rf"no tokenizer\.json in {folder}; try this"):
        require_tokenizer(folder, "try this")
    (folder / "tokenizer.model").touch()
    with pytest.raises(ModelLoadError, match=r"\(only tokenizer\.model, which is not read\)"):
        require_tokenizer(folder, "try this")
