"""Which group a process is of, on its device: the ranks of an engine, its stages with their ranks,
those on several hosts, or replicas that share experts.
"""

from __future__ import annotations

import torch

from ...mq.config import EngineConfig
from ..runner import OtherHosts
from .hosts import join_hosts
from .parallel import PeerGroup, Shape, join_devices, join_processes
from .replicas import join_device_rows, join_process_rows
from .stages import Place
from .stages import join_devices as join_device_stages
from .stages import join_processes as join_process_stages


def join(
    config: EngineConfig, rank: int, engine: int, group_fd: int, shape: Shape, device: torch.device
) -> PeerGroup:
    """group_fd: an empty file that only those of the group have."""
    size, join_all = config.tensor_parallel_size, (join_devices, join_processes)
    if config.lockstep:
        rank, size = engine, config.data_parallel_size
        join_all = (join_device_rows, join_process_rows)
    if device.type != "cuda":
        return join_all[1](rank, size, group_fd, shape)
    return join_all[0](rank, size, group_fd, shape, device, config.startup_timeout)


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
