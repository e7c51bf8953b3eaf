"""Where the GPU's kernels are tested, and in which types."""

from __future__ import annotations

import torch
from interpreted_triton import ON_GPU

DEVICE = torch.device("cuda" if ON_GPU else "cpu")
# The interpreter's tl.dot returns garbage for bfloat16.
DTYPES = [torch.float32, torch.float16] + ([torch.bfloat16] if ON_GPU else [])
