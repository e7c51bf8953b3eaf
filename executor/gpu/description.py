"""What a runner tells people about itself when it has been loaded."""

from __future__ import annotations

import torch

from ...mq.config import EngineConfig
from . import memory
from .decoder import GpuDecoder

Details = dict[str, str | int | float]


def describe(
    config: EngineConfig,
    device: torch.device,
    decoder: GpuDecoder,
    dtype: torch.dtype,
    quantization: str,
    terms: memory.Terms,
    num_blocks: int,
    num_graphs: int,
) -> Details:
    kv_cache = num_blocks * decoder.block_bytes
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "ranks": config.num_workers,
        "stages": config.pipeline_parallel_size,
        "dtype": str(dtype).removeprefix("torch."),
        "quantization": quantization,
        "kv_cache_dtype": str(decoder.cache_dtype).removeprefix("torch."),
        "weights_bytes": decoder.num_bytes,
        "activation_bytes": terms.activations,
        "graph_bytes": terms.graphs,
        "kv_cache_bytes": kv_cache,
        "num_blocks": num_blocks,
        "block_size": config.block_size,
        "graphs": num_graphs,
        "memory": terms.table(kv_cache),
    }
