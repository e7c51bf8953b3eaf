"""What tests of a mixture of experts are made of."""

from __future__ import annotations

import numpy as np
import torch
from kernels.gpu.devices import DEVICE

from ringcast.executor.expert_routes import Routes as HostRoutes
from ringcast.kernels.gpu.expert_routing import Blocks, Routes, make_blocks
from ringcast.kernels.gpu.experts import num_blocks


def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype)


def nans(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full(shape, float("nan"), dtype=dtype, device=DEVICE)


def ints(*shape: int, value: int = -7) -> torch.Tensor:
    return torch.full(shape, value, dtype=torch.int32, device=DEVICE)


def random_experts(tokens: int, num: int, chosen: int) -> torch.Tensor:
    rows = torch.rand(tokens, num, device=DEVICE).argsort(1)[:, :chosen]
    return rows.to(torch.int32).contiguous()


def random_places(tokens: int, num: int, chosen: int, held: int) -> torch.Tensor:
    """Of experts the first of which are held."""
    experts = random_experts(tokens, num, chosen)
    return torch.where(experts < held, experts, -1)


def routes_of(placement: list[list[int]], num: int, rank: int, turn: int = 0) -> Routes:
    """Of experts [R, S], as a rank has them."""
    routes = HostRoutes(num, np.array(placement, np.int32), rank)
    table = np.column_stack([routes.counts_E, routes.places_ER])
    return Routes(torch.from_numpy(table).to(DEVICE), ints(1, value=turn))


def empty_blocks(tokens: int, chosen: int, held: int, rows: int) -> Blocks:
    """One block more than can be in use."""
    blocks = num_blocks(tokens, chosen, held, rows) + 1
    made = make_blocks(blocks, blocks * rows, held, DEVICE)
    for tensor in made:
        tensor.fill_(-7)
    return made
