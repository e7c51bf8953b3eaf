"""A model's folder as Hugging Face lays it out: what must be in it, and whether it is whole."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ...mq.errors import ModelLoadError

LAYOUT = "a model's folder holds config.json, *.safetensors and tokenizer.json"
_INDEX = "model.safetensors.index.json"
_GIT_LFS = b"version https://git-lfs"
_MAX_HEADER = 100_000_000  # the safetensors format's own limit


def read_config(folder: Path) -> dict[str, Any]:
    """config.json. Raises ModelLoadError where it is missing or no JSON object."""
    config = read_json(folder / "config.json")
    if config is not None:
        return config
    ggufs = sorted(folder.glob("*.gguf"))
    hint = f"for a GGUF file give its own path: {ggufs[0]}" if ggufs else LAYOUT
    raise ModelLoadError(f"no config.json in {folder}; {hint}")


def read_json(path: Path) -> dict[str, Any] | None:
    """The JSON object in the file at `path`; None where there is no file.

    Raises ModelLoadError for a file that holds anything else.
    """
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"cannot read {path}: {error}") from error
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path} holds a {type(value).__name__}, not a JSON object")
    return value


def require_weights(folder: Path) -> None:
    """Raises ModelLoadError where a weight file is missing, truncated or no safetensors file."""
    index = read_json(folder / _INDEX)
    if index is not None:
        shards = sorted({folder / name for name in _weight_map(folder, index).values()})
        missing = [shard.name for shard in shards if not shard.is_file()]
        if missing:
            names = ", ".join(missing[:3])
            raise ModelLoadError(
                f"{len(missing)} of {len(shards)} weight files that {_INDEX} names are missing "
                f"in {folder}: {names}"
            )
    else:
        shards = sorted(folder.glob("*.safetensors"))
        if not shards:
            raise ModelLoadError(f"no weights in {folder}: {_what_instead(folder)}")
    for shard in shards:
        _require_whole(shard)


def require_tokenizer(folder: Path, hint: str) -> None:
    """Raises ModelLoadError, ending with `hint`, where there is no tokenizer.json."""
    if (folder / "tokenizer.json").is_file():
        return
    others = [name for name in ("tokenizer.model", "vocab.json") if (folder / name).exists()]
    found = f" (only {others[0]}, which is not read)" if others else ""
    raise ModelLoadError(f"no tokenizer.json in {folder}{found}; {hint}")


def _weight_map(folder: Path, index: dict[str, Any]) -> dict[str, str]:
    names = index.get("weight_map")
    if not isinstance(names, dict) or not names:
        raise ModelLoadError(f"{folder / _INDEX} has no weight_map")
    return names


def _what_instead(folder: Path) -> str:
    pickles = sorted([*folder.glob("*.bin"), *folder.glob("*.pt"), *folder.glob("*.pth")])
    if pickles:
        return (
            f"only safetensors files are read, and it holds {pickles[0].name} "
            "(a pickle runs whatever code is in it)"
        )
    return f"neither {_INDEX} nor *.safetensors; --load-format dummy needs none"


def _require_whole(path: Path) -> None:
    """A safetensors file is the header's length (u64), the header (JSON), and the data."""
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        length = int.from_bytes(start, "little")
        if _GIT_LFS.startswith(start) and size > 0:
            raise ModelLoadError(f"{path} is a Git LFS pointer, not the file: run `git lfs pull`")
        if len(start) < 8 or length > _MAX_HEADER:
            raise ModelLoadError(f"{path} is no safetensors file ({size} bytes)")
        header = file.read(length)
    end = 8 + length + (_data_bytes(path, header) if len(header) == length else 0)
    if size < end:
        raise ModelLoadError(f"{path} is truncated: {size} bytes of at least {end}")
    if size > end:
        raise ModelLoadError(f"{path} is damaged: {size} bytes, but its header tells of {end}")


def _data_bytes(path: Path, header: bytes) -> int:
    try:
        tensors = json.loads(header)
        ends = [t["data_offsets"][1] for name, t in tensors.items() if name != "__metadata__"]
        return max(ends, default=0)
    except (ValueError, AttributeError, KeyError, TypeError, IndexError) as error:
        raise ModelLoadError(f"{path} is no safetensors file: its header is damaged") from error
