"""Which devices a table of configurations holds for."""

from __future__ import annotations

from functools import cache

import torch

Architecture = tuple[int, int]


@cache
def architecture_of(device: torch.device) -> Architecture | None:
    """A CUDA device's compute capability, (9, 0) for Hopper; None for any other device."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None
