"""The CUDA device of a rank, and what several ranks need of their devices and of a model."""

from __future__ import annotations

import torch

from ...kernels.gpu.all_reduce import MOST_RANKS
from ...mq.errors import ConfigError
from .schemes import Scheme


def find_device(rank: int, engine: int = 0, ranks: int = 1) -> torch.device:
    """The device of a rank of a replica that has so many. Raises ConfigError if there is none."""
    number = engine * ranks + rank
    try:
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    except RuntimeError as error:
        raise ConfigError(f"device = 'cuda': {error}") from error
    if number >= count:
        raise ConfigError(
            f"device = 'cuda': worker {number} needs a device of its own, and torch "
            f"{torch.__version__} sees {count}"
        )
    return torch.device("cuda", number)


def check_split(size: int, scheme: Scheme | None, lockstep: bool = False) -> None:
    """Raises ConfigError for weights that can't be split among `size` ranks here, or dealt to
    replicas that step together.
    """
    if scheme is not None and lockstep:
        raise ConfigError(
            f"enable_expert_parallel = True: weights that are quantized ({scheme}) aren't dealt on "
            "device 'cuda'; with them it must be False"
        )
    if scheme is not None and size > 1:
        raise ConfigError(
            f"tensor_parallel_size = {size}: weights that are quantized ({scheme}) aren't split on "
            "device 'cuda'; with them it must be 1"
        )


def check_peers(size: int, first: int = 0, option: str = "tensor_parallel_size") -> None:
    """Raises ConfigError where the devices of `size` ranks, the first of which has device `first`,
    don't reach each other's memory. option: that asks for so many.
    """
    check_ranks(size, option)
    check_access(f"{option} = {size}", first, size)


def check_access(option: str, first: int, size: int) -> None:
    """The same of `size` devices from `first` on. option: what needs them, and its value."""
    for one in range(first, first + size):
        for other in range(first, first + size):
            if one != other and not torch.cuda.can_device_access_peer(one, other):
                raise ConfigError(
                    f"{option}: device {one} can't read the memory of device {other}; workers need "
                    "devices that are connected by NVLink, or PCIe with peer access"
                )


def check_ranks(size: int, option: str = "tensor_parallel_size") -> None:
    if size > MOST_RANKS:
        raise ConfigError(f"{option} = {size}: device 'cuda' takes {MOST_RANKS} at most")
