"""What options and a checkpoint make of weights and KV cache on a CUDA device: checked against each
other, and against what the device can do.
"""

from __future__ import annotations

import torch

from ...kernels.gpu.fp8_linear import FP8
from ...mq.config import EngineConfig
from ...mq.errors import ConfigError, ModelLoadError
from ..quantization import Checkpoint, Fp8Checkpoint

# Compute capabilities: of products with a scale for each row, and of conversions.
FP8_PRODUCTS, FP8_CONVERSIONS = (9, 0), (8, 9)


class Fp8AtLoad:
    """Weights of 16 bits become 8 as they are loaded."""

    def __str__(self) -> str:
        return "fp8, dynamic activations"


Scheme = Checkpoint | Fp8AtLoad


def choose_scheme(
    config: EngineConfig, found: Checkpoint | None, dtype: torch.dtype, device: torch.device
) -> Scheme | None:
    """What linear layers have; None: `dtype`. Raises ConfigError for what doesn't go together."""
    wanted = config.quantization
    if found is not None and config.load_format == "dummy":
        raise ModelLoadError(
            f"load_format = 'dummy': makes no weights as config.json has them ({found})"
        )
    if wanted == "fp8" and found is not None and not isinstance(found, Fp8Checkpoint):
        raise ConfigError(
            f"quantization = 'fp8': the checkpoint is quantized already ({found}); leave it 'none'"
        )
    scheme = Fp8AtLoad() if wanted == "fp8" and found is None else found
    if isinstance(scheme, Fp8AtLoad | Fp8Checkpoint):
        if dtype != torch.bfloat16:
            name = str(dtype).removeprefix("torch.")
            raise ConfigError(f"dtype = {name!r}: with weights of fp8 it must be 'bfloat16'")
        _check_capability(device, FP8_PRODUCTS, f"weights of fp8 ({scheme})")
    return scheme


def choose_dtype(name: str) -> torch.dtype:
    dtype: torch.dtype = torch.bfloat16 if name == "auto" else getattr(torch, name)
    return dtype


def choose_cache_dtype(
    config: EngineConfig, dtype: torch.dtype, device: torch.device
) -> torch.dtype:
    """Of the KV cache, where the model's is `dtype`. Raises ConfigError for another one of 16 or 32
    bits: attention's kernels cast what has 8.
    """
    wanted, own = config.kv_cache_dtype, str(dtype).removeprefix("torch.")
    if wanted in ("auto", own):
        return dtype
    if wanted not in ("fp8", "fp8_e4m3"):
        raise ConfigError(
            f"kv_cache_dtype = {wanted!r}: on device 'cuda' it is 'auto', the model's ({own!r}), "
            "'fp8' or 'fp8_e4m3'"
        )
    _check_capability(device, FP8_CONVERSIONS, f"kv_cache_dtype = {config.kv_cache_dtype!r}")
    return FP8


def _check_capability(device: torch.device, least: tuple[int, int], what: str) -> None:
    if device.type != "cuda":  # tests, where the kernels are interpreted
        return
    found = torch.cuda.get_device_capability(device)
    if found < least:
        raise ConfigError(
            f"{what}: needs a device of compute capability {least[0]}.{least[1]}, and "
            f"{torch.cuda.get_device_name(device)} has {found[0]}.{found[1]}"
        )
