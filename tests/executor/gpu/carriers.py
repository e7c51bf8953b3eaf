"""A carrier of experts' weights between processes that have no group of torch's yet: on processors,
or on one device, which NCCL takes for one of several hosts.
"""

from __future__ import annotations

import os
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist

from ringcast.executor import expert_balancer
from ringcast.executor.gpu.device_experts import Carrier, GroupCarrier
from ringcast.executor.gpu.parallel import ENVIRONMENT


def join_carrier(rank: int, size: int, store_fd: int, device: torch.device) -> Carrier:
    """store_fd: of an empty file that all have."""
    on_gpu = device.type == "cuda"
    if on_gpu:
        os.environ.update(ENVIRONMENT | {"NCCL_HOSTID": f"host-{rank}"})
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        store=dist.FileStore(f"/proc/self/fd/{store_fd}", size),
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=60),
        device_id=device if on_gpu else None,
    )
    return GroupCarrier()


def leave_carrier() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def move_always() -> None:
    """In each round every rank gets what another one has, whatever loads are."""

    def place(loads_E: np.ndarray, current_RS: np.ndarray) -> np.ndarray:
        placed_RS = current_RS.copy()
        for rank, wanted_S in enumerate(np.roll(current_RS, 1, axis=0)):
            own_S = current_RS[rank]
            placed_RS[rank, ~np.isin(own_S, wanted_S)] = np.setdiff1d(wanted_S, own_S)
        return placed_RS

    expert_balancer.place = place
