"""The devices a model can run on, and what an engine's options have to do with them.

`auto` is settled where a config is made, so that every actor sees the device itself: it is cuda
where three things are there, and else cpu.

    /dev/nvidiactl and /dev/nvidiaN   a driver and a device that this process may open
    CUDA_VISIBLE_DEVICES              not set, or it begins with a device's number or UUID
    torch                             built for CUDA, by its version.py

All of it is read from files, because processes without torch must know. Whether the device works is
only seen by the worker, which says so. (On WSL there is no /dev/nvidiactl: name the device there.)
"""

from __future__ import annotations

import importlib.util
import os
import re
from itertools import takewhile
from pathlib import Path
from typing import Any, cast

# The default of an option that each device has its own for. No config that has been made has it.
BY_DEVICE = cast(int, None)

_SMALL = {"max_num_seqs": 128, "max_num_batched_tokens": 2048, "block_size": 16}
DEVICE_DEFAULTS: dict[str, dict[str, int]] = {
    "cpu": _SMALL,
    "cuda": {"max_num_seqs": 256, "max_num_batched_tokens": 8192, "block_size": 64},
    "fake": _SMALL,
}

# Options that mean something on some devices only.
ONLY_ON: dict[str, tuple[str, ...]] = {
    "num_threads": ("cpu",),
    "memory_utilization": ("cpu",),
    "gpu_memory_utilization": ("cuda",),
    "enforce_eager": ("cuda",),
    "kv_cache_dtype": ("cpu", "cuda"),
    "enable_eplb": ("cpu", "cuda"),
}
# Likewise values of them.
VALUES_ONLY_ON: dict[str, dict[str, tuple[str, ...]]] = {
    "kv_cache_dtype": {"fp8": ("cuda",), "fp8_e4m3": ("cuda",)},
}

DEV = Path("/dev")
_CUDA_BUILD = re.compile(r"^cuda\b[^=]*=\s*['\"]", re.MULTILINE)


def find_device() -> str:
    """What `auto` is on this machine: "cuda" or "cpu"."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    usable = _has_device() and _lets_see(visible) and _is_cuda_build(_torch_version())
    return "cuda" if usable else "cpu"


def num_cuda_devices() -> int:
    """How many a process may see at most, by the same files; 0 where they don't say."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return len(list(DEV.glob("nvidia[0-9]*")))
    return len(list(takewhile(_lets_see, visible.split(","))))


def explain_default(option: str) -> str:
    """An option's defaults by device, in words; empty if it has none of that kind."""
    devices: dict[int, list[str]] = {}
    for device, defaults in DEVICE_DEFAULTS.items():
        if option in defaults:
            devices.setdefault(defaults[option], []).append(device)
    return ", ".join(f"{value} on {' and '.join(names)}" for value, names in devices.items())


def check_device_options(
    device: str, found: bool, values: dict[str, Any], defaults: dict[str, Any]
) -> None:
    """Raises ValueError for an option that differs from its default and can't work on `device`.

    found: the device is what `auto` is here, so the user may not know it.
    """
    which = f"{device!r}" + (" (auto; --device takes another)" if found else "")
    for option, devices in ONLY_ON.items():
        only = VALUES_ONLY_ON.get(option, {}).get(values[option], devices)
        if device not in only and values[option] != defaults[option]:
            have = " and ".join(map(repr, only))
            have += " have it" if len(only) > 1 else " alone has it"
            raise ValueError(
                f"{option} = {values[option]!r}: device {have}, and this engine's is {which}"
            )
    size = values["block_size"]
    if device == "cuda" and (size < 16 or size & (size - 1)):
        raise ValueError(f"block_size = {size}: device {which} takes 16, 32, 64, 128 or 256")


def _has_device() -> bool:
    nodes = [DEV / "nvidiactl", *DEV.glob("nvidia[0-9]*")]
    may_open = [os.access(node, os.R_OK | os.W_OK) for node in nodes]
    return may_open[0] and any(may_open[1:])


def _lets_see(visible: str | None) -> bool:
    """Whether a value of CUDA_VISIBLE_DEVICES lets a process see a device: the driver reads it up
    to the first entry that is none.
    """
    if visible is None:
        return True
    first = visible.split(",")[0].strip()
    return first.isdecimal() or first.startswith(("GPU-", "MIG-"))


def _torch_version() -> str:
    """torch/version.py as it is installed; empty where there is none."""
    found = importlib.util.find_spec("torch")  # of a package's root nothing is run
    for folder in (found and found.submodule_search_locations) or ():
        file = Path(folder) / "version.py"
        if file.is_file():
            return file.read_text(encoding="utf-8")
    return ""


def _is_cuda_build(version: str) -> bool:
    return _CUDA_BUILD.search(version) is not None
