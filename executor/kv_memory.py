"""How much memory there is for the KV cache, measured, and how many blocks that makes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..mq.config import EngineConfig
from ..mq.errors import ConfigError
from ..mq.kv_groups import blocks_for, longest_chunk, longest_sequence
from ..mq.messages import KVSpec

NULL_BLOCKS = 1  # block 0 belongs to nobody: it is where padding reads and writes


def available_bytes(root: Path = Path("/")) -> int:
    """What this process can still allocate: the machine's free memory, or less by a control group's
    limit.
    """
    for line in (root / "proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            free = int(line.split()[1]) * 1024
            break
    else:
        raise ConfigError("/proc/meminfo has no MemAvailable; set kv_cache_memory_bytes")
    return max(0, min([free, *_group_rooms(root)]))


def _group_rooms(root: Path) -> list[int]:
    """Bytes left under each limit on this process: its own group's, and those above it."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    rooms: list[int] = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            for mount in (root / "sys/fs/cgroup", root / "sys/fs/cgroup/unified"):
                rooms += _rooms(mount, path, "memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            names = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
            rooms += _rooms(root / "sys/fs/cgroup/memory", path, *names)
    return rooms


def _rooms(mount: Path, path: str, limit: str, usage: str, cache: str) -> list[int]:
    """Inside a container the group may be mounted as the root, so paths that aren't there are
    passed over.
    """
    rooms = []
    folder = mount / path.lstrip("/")
    for group in [folder, *folder.parents]:
        if (group / limit).exists():
            most, used = (group / limit).read_text().strip(), int((group / usage).read_text())
            if most != "max":
                rooms.append(int(most) - used + _reclaimable(group / "memory.stat", cache))
        if group == mount:
            break
    return rooms


def _reclaimable(stat: Path, name: str) -> int:
    """File pages that the kernel drops when memory is short; a group's usage counts them."""
    for line in stat.read_text().splitlines() if stat.exists() else []:
        if line.split()[0] == name:
            return int(line.split()[1])
    return 0


def num_blocks(
    config: EngineConfig,
    groups: Sequence[KVSpec],
    max_model_len: int,
    block_bytes: int,
    available: int,
) -> int:
    """Blocks of the cache, block 0 included. Raises ConfigError if not even one sequence fits."""
    chunk, size = longest_chunk(config), config.block_size
    per_sequence = blocks_for(groups, max_model_len, chunk, size)
    most = config.max_num_seqs * per_sequence + NULL_BLOCKS
    if config.num_gpu_blocks_override is not None:
        blocks, source = config.num_gpu_blocks_override, "num_gpu_blocks_override"
    else:
        if config.kv_cache_memory_bytes is not None:
            space, source = config.kv_cache_memory_bytes, "kv_cache_memory_bytes"
        else:
            space, source = int(config.memory_utilization * available), "memory_utilization"
        blocks = min(space // block_bytes, most)
        if blocks < 1 + NULL_BLOCKS:
            raise ConfigError(
                f"one KV-cache block and the reserved one need {(1 + NULL_BLOCKS) * block_bytes} "
                f"bytes, and there are {space} ({source}, of {available} bytes available): "
                f"free memory, or raise {source}"
            )
    tokens = longest_sequence(groups, blocks - NULL_BLOCKS, chunk, size)
    if tokens < max_model_len:
        need = (per_sequence + NULL_BLOCKS) * block_bytes
        raise ConfigError(
            f"max_model_len is {max_model_len}, and the KV cache has room for {tokens} tokens "
            f"({blocks} blocks): set max_model_len to at most {tokens}, or raise {source} "
            f"(one such sequence needs {need} bytes, and there are {blocks * block_bytes})"
        )
    return blocks
