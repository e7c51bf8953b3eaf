"""Where the GPU's kernels are tested, and in which types."""

from __future__ import annotations

import torch
from interpreted_triton import ON_GPU
from triton.runtime import interpreter

DEVICE = torch.device("cuda", 0) if ON_GPU else torch.device("cpu")
# The interpreter's tl.dot returns garbage for bfloat16.
DTYPES = [torch.float32, torch.float16] + ([torch.bfloat16] if ON_GPU else [])


def _take_scalars_as_bounds() -> None:
    """Triton 3.6's interpreter makes a loop's bound an int in a way that numpy 2.4 refuses."""
    patch = interpreter._patch_lang_tensor

    def patched(tensor, scope):
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patched


if not ON_GPU:
    _take_scalars_as_bounds()
