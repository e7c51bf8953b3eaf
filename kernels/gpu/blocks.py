"""Copies of whole blocks within the paged KV cache, all layers in one launch.

Legend: C copies.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

CHUNK = 4096  # elements that one program copies


def copy_blocks_reference(
    cache: torch.Tensor, sources_C: torch.Tensor, targets_C: torch.Tensor
) -> None:
    real_C = (sources_C >= 0) & (targets_C >= 0)
    cache[:, :, targets_C[real_C].long()] = cache[:, :, sources_C[real_C].long()]


def copy_blocks(cache: torch.Tensor, sources_C: torch.Tensor, targets_C: torch.Tensor) -> None:
    """Block targets[c] becomes a copy of block sources[c] in each layer.

    cache: [layers, 2, blocks, kv_heads, block_size, D]. sources, targets: int32; a negative one is
    padding. All copies run at once: no target may be a source or another's target.
    """
    block_size, head_size = cache.shape[-2:]
    if cache.dim() != 6 or cache.stride()[3:] != (block_size * head_size, head_size, 1):
        raise ValueError(
            f"cache is {tuple(cache.shape)} of strides {cache.stride()}; it must be "
            "[layers, 2, blocks, kv_heads, block_size, D] with blocks in one piece"
        )
    if sources_C.shape != targets_C.shape:
        raise ValueError(f"{sources_C.shape[0]} sources, {targets_C.shape[0]} targets")
    size = cache.shape[3] * block_size * head_size
    _copy_blocks_kernel[(sources_C.shape[0], cache.shape[0] * 2, triton.cdiv(size, CHUNK))](
        cache,
        sources_C,
        targets_C,
        sources_C.stride(0),
        targets_C.stride(0),
        cache.stride(0),
        cache.stride(1),
        cache.stride(2),
        SIZE=size,
        CHUNK=CHUNK,
        num_warps=8,
    )


@triton.jit
def _copy_blocks_kernel(
    cache,
    sources,
    targets,
    source_stride,
    target_stride,
    layer_stride,
    part_stride,
    block_stride,
    SIZE: tl.constexpr,
    CHUNK: tl.constexpr,
):
    source = tl.load(sources + tl.program_id(0) * source_stride).to(tl.int64)
    target = tl.load(targets + tl.program_id(0) * target_stride).to(tl.int64)
    plane = tl.program_id(1).to(tl.int64)
    first = cache + plane // 2 * layer_stride + plane % 2 * part_stride
    i = tl.program_id(2) * CHUNK + tl.arange(0, CHUNK)
    real = (i < SIZE) & (source >= 0) & (target >= 0)
    values = tl.load(first + source * block_stride + i, mask=real)
    tl.store(first + target * block_stride + i, values, mask=real)
