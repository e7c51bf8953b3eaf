"""Rows of the embedding table by token id.

Legend: T tokens, V vocabulary, H hidden.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 1024


def embed_reference(
    token_ids_T: torch.Tensor,
    table_VH: torch.Tensor,
    out_TH: torch.Tensor,
    scale: float = 1.0,
    *,
    first: int = 0,
    pdl: bool = False,
) -> None:
    token_ids_T = token_ids_T - first
    known_T = (token_ids_T >= 0) & (token_ids_T < table_VH.shape[0])
    rows_TH = table_VH[torch.where(known_T, token_ids_T, 0).long()].float() * scale
    out_TH.copy_(torch.where(known_T[:, None], rows_TH, 0.0))


def embed(
    token_ids_T: torch.Tensor,
    table_VH: torch.Tensor,
    out_TH: torch.Tensor,
    scale: float = 1.0,
    *,
    first: int = 0,
    pdl: bool = False,
) -> None:
    """out = table[token_ids - first] * scale. token_ids: int32; one outside of the table gives
    zeros.
    """
    tokens, size = out_TH.shape
    if token_ids_T.shape != (tokens,) or table_VH.shape[1] != size:
        raise ValueError(
            f"token_ids is {tuple(token_ids_T.shape)}, table {tuple(table_VH.shape)}, "
            f"out {tuple(out_TH.shape)}"
        )
    if table_VH.stride(1) != 1 or out_TH.stride(1) != 1:
        raise ValueError("rows must be in one piece")
    block = min(triton.next_power_of_2(size), BLOCK)
    _embed_kernel[(tokens, triton.cdiv(size, block))](
        token_ids_T,
        table_VH,
        out_TH,
        table_VH.stride(0),
        out_TH.stride(0),
        table_VH.shape[0],
        size,
        first,
        scale,
        BLOCK=block,
        PDL=pdl,
        num_warps=4,
        launch_pdl=pdl,
    )


@triton.jit
def _embed_kernel(
    token_ids,
    table,
    out,
    table_stride,
    out_stride,
    vocab_size,
    size,
    first,
    scale,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = h < size
    token = tl.load(token_ids + row).to(tl.int64) - first
    known = inside & (token >= 0) & (token < vocab_size)
    values = tl.load(table + token * table_stride + h, mask=known, other=0.0).to(tl.float32) * scale
    tl.store(out + row * out_stride + h, values.to(out.dtype.element_ty), mask=inside)
