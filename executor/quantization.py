"""How a checkpoint's weights are quantised, by the quantization_config in its config.json.

    quant_method          what is read                                         becomes
    awq                   4 bits, zero points, version gemm                    Int4Checkpoint
    gptq                  4 bits, inputs in their own order (desc_act false)   Int4Checkpoint
    fp8                   8 bits (float8_e4m3fn), a scale for a whole weight   Fp8Checkpoint
    compressed-tensors    the same, or a scale for each output                 Fp8Checkpoint

What is not read is refused here by name, so that no weight is ever taken for what it isn't. A layer
that a checkpoint left in 16 bits is known by its tensors, whatever the lists of such layers say.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..mq.errors import ModelLoadError


@dataclass(frozen=True)
class Int4Checkpoint:
    """method: "awq" or "gptq", which pack their tensors differently. group: inputs that share a
    scale; -1: all of them. zero_offset: added to zero points as they are stored.
    """

    method: str
    group: int
    zero_offset: int

    def __str__(self) -> str:
        return f"{self.method}, 4 bits, groups of {'all' if self.group < 0 else self.group} inputs"


@dataclass(frozen=True)
class Fp8Checkpoint:
    """dynamic: each token's activations have a scale of their own; otherwise the checkpoint has one
    for each layer.
    """

    method: str
    dynamic: bool

    def __str__(self) -> str:
        return f"{self.method}, fp8, {'dynamic' if self.dynamic else 'static'} activations"


Checkpoint = Int4Checkpoint | Fp8Checkpoint


def read_quantization(hf_config: dict[str, Any]) -> Checkpoint | None:
    """None: weights are of 16 or 32 bits. Raises ModelLoadError naming what isn't supported."""
    found = hf_config.get("quantization_config")
    if not found:
        return None
    if not isinstance(found, dict):
        raise _refusal("", found, "an object")
    method = found.get("quant_method")
    try:
        read = _METHODS[method]
    except (KeyError, TypeError):
        raise _refusal("quant_method", method, ", ".join(map(repr, _METHODS))) from None
    return read(found)


def refuse_quantized(hf_config: dict[str, Any], device: str) -> None:
    """Raise ModelLoadError if a checkpoint is quantised, for a device that reads none."""
    if found := read_quantization(hf_config):
        raise ModelLoadError(
            f"config.json: quantized weights (quantization_config: {found}) are not supported on "
            f"device {device!r}; 'cuda' reads them"
        )


def _refusal(name: str, value: object, supported: str) -> ModelLoadError:
    field = f"quantization_config.{name}" if name else "quantization_config"
    return ModelLoadError(f"config.json: {field} = {value!r} is not supported; {supported} is")


def _require(found: dict[str, Any], name: str, *supported: Any) -> Any:
    """The value, which must be one of `supported`; the first of these where there is none."""
    value = found.get(name)
    value = supported[0] if value is None else value
    if not any(value == each and type(value) is type(each) for each in supported):
        raise _refusal(name, value, " or ".join(map(repr, supported)))
    return value


def _group(found: dict[str, Any], *names: str) -> int:
    value = next((found[name] for name in names if found.get(name) is not None), None)
    if isinstance(value, bool) or not isinstance(value, int) or (value < 1 and value != -1):
        raise _refusal(names[0], value, "a positive integer, or -1")
    return value


def _read_awq(found: dict[str, Any]) -> Int4Checkpoint:
    _require(found, "w_bit" if "w_bit" in found else "bits", 4)
    _require(found, "zero_point", True)
    _require(found, "version", "gemm", "GEMM")
    return Int4Checkpoint("awq", _group(found, "group_size", "q_group_size"), 0)


def _read_gptq(found: dict[str, Any]) -> Int4Checkpoint:
    _require(found, "bits", 4)
    _require(found, "desc_act", False)
    _require(found, "lm_head", False)
    if found.get("dynamic"):
        raise _refusal("dynamic", found["dynamic"], "one way for all layers")
    layout = _require(found, "checkpoint_format", "gptq", "gptq_v2")
    # The first format stores a zero point less one.
    return Int4Checkpoint("gptq", _group(found, "group_size"), 1 if layout == "gptq" else 0)


def _read_fp8(found: dict[str, Any]) -> Fp8Checkpoint:
    if found.get("weight_block_size") is not None:
        size = found["weight_block_size"]
        raise _refusal("weight_block_size", size, "one scale for a whole weight")
    _require(found, "fmt", "e4m3")
    scheme = _require(found, "activation_scheme", "dynamic", "static")
    return Fp8Checkpoint("fp8", scheme == "dynamic")


def _read_compressed_tensors(found: dict[str, Any]) -> Fp8Checkpoint:
    _require(found, "format", "float-quantized", "naive-quantized")
    groups = found.get("config_groups")
    if not isinstance(groups, dict) or len(groups) != 1:
        names = list(groups) if isinstance(groups, dict) else groups
        raise _refusal("config_groups", names, "one group")
    ((name, group),) = groups.items()
    group = group if isinstance(group, dict) else {}
    _require_part(group, f"config_groups.{name}.targets", ["Linear"])
    weights, activations = (
        _check_type(group.get(part), f"config_groups.{name}.{part}")
        for part in ("weights", "input_activations")
    )
    where = f"config_groups.{name}."
    _require_part(weights, f"{where}weights.strategy", "channel", "tensor")
    _require_part(weights, f"{where}weights.dynamic", False, None)
    dynamic = _require_part(activations, f"{where}input_activations.dynamic", True, False)
    strategy = "token" if dynamic else "tensor"
    _require_part(activations, f"{where}input_activations.strategy", strategy)
    return Fp8Checkpoint("compressed-tensors", dynamic)


def _check_type(part: Any, where: str) -> dict[str, Any]:
    if not isinstance(part, dict):
        raise _refusal(where, part, "float of 8 bits")
    _require_part(part, f"{where}.num_bits", 8)
    _require_part(part, f"{where}.type", "float")
    _require_part(part, f"{where}.symmetric", True)
    return part


def _require_part(part: dict[str, Any], where: str, *supported: Any) -> Any:
    """As _require, with the whole path in the message and no default."""
    value = part.get(where.rpartition(".")[2])
    if not any(value == each and type(value) is type(each) for each in supported):
        raise _refusal(where, value, " or ".join(map(repr, supported)))
    return value


_METHODS: dict[Any, Callable[[dict[str, Any]], Checkpoint]] = {
    "awq": _read_awq,
    "compressed-tensors": _read_compressed_tensors,
    "fp8": _read_fp8,
    "gptq": _read_gptq,
}
