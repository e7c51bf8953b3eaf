"""Triton's kernels run compiled where there is a CUDA device, else under its interpreter."""

from __future__ import annotations

import os

# Asked without torch, whose import takes seconds: tests/conftest.py is read for every test.
ON_GPU = os.path.exists("/dev/nvidiactl")


def choose_triton() -> None:
    """Comes before triton is imported, which reads its environment once."""
    if not ON_GPU:
        os.environ["TRITON_INTERPRET"] = "1"
