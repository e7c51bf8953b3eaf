"""Weights by name, from safetensors files (mapped, not read) or made up, each taken once and
checked.

A `WeightSource` gives a tensor for a name and an expected shape, and at the end names what nobody
took. What is in the files and must not be there is as wrong as what is missing: either way the
model would not be the one that was trained.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open

from ..mq.errors import ModelLoadError
from .models.llama import Experts

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

Part = tuple[slice, ...]  # of a tensor, by dimension; of those that aren't named, all


class WeightSource(Protocol):
    def has(self, name: str) -> bool:
        """Whether there is such a tensor, not taken yet, beside those that every model has."""

    def take(
        self,
        name: str,
        shape: tuple[int, ...] | None,
        part: Part = (),
        dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """The tensor, or only a part of it; of `dtype` or (None) of any floating-point type of 16
        bits or more. `shape` is the whole one's (None: any). Raises ModelLoadError if it is
        missing, or of another shape or type.
        """

    def finish(self, ignored: Callable[[str], bool]) -> None:
        """Raise ModelLoadError if there are tensors that were not taken and are not `ignored`."""


def take_experts(
    source: WeightSource, experts: Experts, hidden_size: int, layer: str
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Gate and up [inner, hidden] and down [hidden, inner] of each expert that is held, in the
    order of their numbers.

    layer: what the names of the layer's tensors begin with. Others' tensors are taken, too, so that
    files are checked whole; of these a source for ranks gives nothing.
    """
    wide, narrow = (experts.inner_size, hidden_size), (hidden_size, experts.inner_size)
    for number in range(experts.num):
        prefix = f"{layer}{experts.block}experts.{number}."
        gate, up, down = (
            source.take(f"{prefix}{name}.weight", shape)
            for name, shape in zip(experts.names, (wide, wide, narrow), strict=True)
        )
        if (number - experts.first) % experts.num < experts.held:
            yield gate, up, down


class SafetensorsWeights:
    """The tensors of a folder. Files are mapped: what is taken is read when it is copied."""

    def __init__(self, folder: str) -> None:
        self._left: dict[str, safe_open] = {}
        self._files: dict[str, Path] = {}
        for path in _files(Path(folder)):
            handle = _open(path)
            for name in handle.keys():  # noqa: SIM118 - a safe_open is no mapping
                if name in self._left:
                    raise ModelLoadError(
                        f"tensor {name!r} is in both {self._files[name]} and {path}"
                    )
                self._left[name], self._files[name] = handle, path

    def has(self, name: str) -> bool:
        return name in self._left

    def take(
        self,
        name: str,
        shape: tuple[int, ...] | None,
        part: Part = (),
        dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        if name not in self._left:
            raise ModelLoadError(f"tensor {name!r} is missing from the weights")
        handle = self._left.pop(name)
        where = f"{self._files[name]}: tensor {name!r}"
        stored = handle.get_slice(name).get_shape()
        if shape is not None and tuple(stored) != shape:
            raise ModelLoadError(f"{where} has shape {stored}, config.json says {list(shape)}")
        tensor: torch.Tensor = handle.get_slice(name)[part] if part else handle.get_tensor(name)
        if dtype is not None:
            if tensor.dtype != dtype:
                raise ModelLoadError(f"{where} is {tensor.dtype}; it must be {dtype}")
        elif not tensor.is_floating_point() or tensor.itemsize < 2:
            raise ModelLoadError(
                f"{where} is {tensor.dtype}; bfloat16, float16 and float32 weights are supported"
            )
        return tensor

    def finish(self, ignored: Callable[[str], bool]) -> None:
        extra = sorted(name for name in self._left if not ignored(name))
        if extra:
            more = f" and {len(extra) - 1} more" if len(extra) > 1 else ""
            raise ModelLoadError(
                f"{self._files[extra[0]]}: tensor {extra[0]!r}{more} is not part of a model as "
                "config.json describes it"
            )


class DummyWeights:
    """Random weights of about the size that trained ones have: the same for the same name, seed and
    device (where they are drawn), whatever else is taken.
    """

    def __init__(self, seed: int, device: torch.device | None = None) -> None:
        self._device = device or torch.device("cpu")
        self._generator = torch.Generator(self._device)
        self._seed = seed

    def has(self, name: str) -> bool:
        return False

    def take(
        self,
        name: str,
        shape: tuple[int, ...] | None,
        part: Part = (),
        dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        assert shape is not None
        assert dtype is None
        if name.lower().endswith("norm.weight"):
            return torch.ones(shape, device=self._device)[part]
        self._generator.manual_seed(zlib.crc32(f"{self._seed} {name}".encode()))
        drawn = torch.empty(shape, device=self._device)
        return drawn.normal_(0, 0.02, generator=self._generator)[part]

    def finish(self, ignored: Callable[[str], bool]) -> None:
        pass


def _files(folder: Path) -> list[Path]:
    index = folder / INDEX
    if not index.exists():
        if not (folder / SINGLE).exists():
            raise ModelLoadError(f"{folder} has neither {SINGLE} nor {INDEX}")
        return [folder / SINGLE]
    try:
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelLoadError(f"{index} is damaged: {error!r}") from error
    missing = [name for name in names if not (folder / name).exists()]
    if missing:
        raise ModelLoadError(f"{folder / missing[0]} is missing; {INDEX} lists it")
    return [folder / name for name in names]


def _open(path: Path) -> safe_open:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ModelLoadError(f"{path} is damaged or truncated: {error}") from error
