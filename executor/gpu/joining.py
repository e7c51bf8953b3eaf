"""Which group a process is of, on its device: the ranks of an engine, its stages with their ranks,
or those on several hosts. (Replicas that share experts: replica_joining.py.)
"""

from __future__ import annotations

import torch

from ...mq.config import EngineConfig
from ..runner import OtherHosts
from .hosts import join_hosts
from .parallel import PeerGroup, Shape, join_devices, join_processes
from .stages import Place
from .stages import join_devices as join_device_stages
from .stages import join_processes as join_process_stages


def join(
    config: EngineConfig, rank: int, group_fd: int, shape: Shape, device: torch.device
) -> PeerGroup:
    """group_fd: an empty file that only those of the group have."""
    size = config.tensor_parallel_size
    if device.type != "cuda":
        return join_processes(rank, size, group_fd, shape)
    return join_devices(rank, size, group_fd, shape, device, config.startup_timeout)


def join_stages(
    config: EngineConfig,
    worker: int,
    group_fd: int,
    shape: Shape,
    device: torch.device,
    others: OtherHosts | None = None,
) -> Place:
    """The same of the workers of an engine that has several stages, or is on several hosts."""
    if others is not None:
        return join_hosts(config, worker, others, group_fd, shape, device)
    if device.type != "cuda":
        return join_process_stages(config, worker, group_fd, shape)
    return join_device_stages(config, worker, group_fd, shape, device)
