"""Random inputs and comparisons of the CPU kernels' tests."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ringcast.kernels.cpu import tiles

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}
needs_tiles = pytest.mark.skipif(not tiles.available(), reason="this processor has no matrix tiles")


def nans(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full(shape, float("nan"), dtype=dtype)


def count(n: int) -> np.ndarray:
    return np.array([n], np.int64)


def assert_close(
    actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype, scale: float = 1.0
) -> None:
    limit = TOLERANCE[dtype] * scale
    torch.testing.assert_close(actual.float(), expected.float(), rtol=limit, atol=limit)
