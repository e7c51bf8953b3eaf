"""Where the GPU's kernels are tested, and in which types."""

from __future__ import annotations

import numpy as np
import torch
import triton.language as tl
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


def _round_to_eight_bits() -> None:
    """Triton 3.6's interpreter loses the carry where a number is rounded up to a power of two. A
    device rounds to the nearest, of two the even one, and saturates.
    """
    builder = interpreter.InterpreterBuilder
    convert = builder.create_fp_to_fp

    def patched(self, source, target, rounding):
        if target.scalar != tl.float8e4nv:
            return convert(self, source, target, rounding)
        values = torch.from_numpy(np.ascontiguousarray(source.data, np.float32)).clamp(-448, 448)
        rounded = values.to(torch.float8_e4m3fn).view(torch.uint8).numpy()
        return interpreter.TensorHandle(rounded, target.scalar)

    builder.create_fp_to_fp = patched


if not ON_GPU:
    _take_scalars_as_bounds()
    _round_to_eight_bits()
