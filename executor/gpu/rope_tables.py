"""Rotary position embedding as tables by position, one pair for each kind of rotation."""

from __future__ import annotations

from typing import NamedTuple

import torch

from .. import rope


class RopeTable(NamedTuple):
    """cos and sin float32 [P, D / 2] of all positions P, D being the head size."""

    cos_PD2: torch.Tensor
    sin_PD2: torch.Tensor


def make_rope_table(
    parameters: rope.RopeParameters, head_size: int, max_model_len: int, device: torch.device
) -> RopeTable:
    """Of every position that a token may have. Made on the host, as the CPU's are."""
    frequency_D2, scale = rope.frequencies(parameters, head_size, max_model_len)
    angles_PD2 = torch.arange(max_model_len + 1).float()[:, None] * frequency_D2
    return RopeTable(
        (angles_PD2.cos() * scale).to(device).contiguous(),
        (angles_PD2.sin() * scale).to(device).contiguous(),
    )
