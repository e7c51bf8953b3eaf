"""Triton kernels for CUDA devices, each beside a plain-torch reference of the same name."""
