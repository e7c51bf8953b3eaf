"""Rotary position embedding: the frequencies of each kind of context extension.

A pair of dimensions i of a head turns by position * frequency[i]. Kinds (`rope_type`): "default";
"linear" (positions are squeezed); "dynamic" (NTK-aware base, by u/emozilla); "llama3" (only long
wavelengths are squeezed, smoothly); "yarn" (Peng et al., 2023: a ramp between squeezed and not, and
sharper attention).

"dynamic" is made for the longest sequence that this engine may serve: within the model's own length
it changes nothing, and beyond it all sequences share one set of frequencies, because cached keys
can't be turned again.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ..mq.errors import ModelLoadError


class RopeParameters(NamedTuple):
    """kind, theta and the rest of config.json's dictionary; max_positions is the model's own
    length.
    """

    kind: str
    theta: float
    values: dict[str, Any]
    max_positions: int

    def number(self, name: str) -> float:
        value = self.values.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ModelLoadError(
                f"config.json: rope type {self.kind!r} needs a number {name!r}, got {value!r}"
            )
        return float(value)

    def original_length(self) -> float:
        return float(self.values.get("original_max_position_embeddings") or self.max_positions)


def read_parameters(hf_config: dict[str, Any]) -> RopeParameters:
    """From `rope_parameters` (transformers 5), or `rope_theta` and `rope_scaling` (before).
    ModelLoadError if unknown.
    """
    values = dict(hf_config.get("rope_scaling") or {}) | dict(
        hf_config.get("rope_parameters") or {}
    )
    kind = values.get("rope_type") or values.get("type") or "default"
    theta = values.get("rope_theta") or hf_config.get("rope_theta") or 10000.0
    if kind not in FREQUENCIES:
        raise ModelLoadError(
            f"config.json: rope type {kind!r} is not supported; {', '.join(FREQUENCIES)} are"
        )
    if values.get("partial_rotary_factor", hf_config.get("partial_rotary_factor")) not in (
        None,
        1,
        1.0,
    ):
        raise ModelLoadError("config.json: partial_rotary_factor other than 1 is not supported")
    if "original_max_position_embeddings" in hf_config:
        values.setdefault(
            "original_max_position_embeddings", hf_config["original_max_position_embeddings"]
        )
    return RopeParameters(
        kind, float(theta), values, int(hf_config.get("max_position_embeddings", 2048))
    )


def frequencies(
    rope: RopeParameters, head_size: int, max_model_len: int
) -> tuple[torch.Tensor, float]:
    """float32 [head_size / 2], and the factor that cos and sin are multiplied by."""
    return FREQUENCIES[rope.kind](rope, head_size, max_model_len)


class Rotation:
    """cos and sin of a step's positions, for layers that share their frequencies."""

    def __init__(self, rope: RopeParameters, head_size: int, max_model_len: int, capacity: int):
        self._frequency, self._scale = frequencies(rope, head_size, max_model_len)
        self.cos, self.sin = torch.empty(2, capacity, head_size // 2)

    def turn(self, positions: torch.Tensor) -> None:
        """positions float32 [T]: of the first T rows of cos and sin."""
        angles_TD = positions[:, None] * self._frequency
        cos, sin = self.cos[: len(positions)], self.sin[: len(positions)]
        torch.cos(angles_TD, out=cos)
        torch.sin(angles_TD, out=sin)
        if self._scale != 1.0:
            cos *= self._scale
            sin *= self._scale


def _plain(theta: float, head_size: int) -> torch.Tensor:
    return 1.0 / theta ** (torch.arange(0, head_size, 2, dtype=torch.float) / head_size)


def _default(
    rope: RopeParameters, head_size: int, max_model_len: int
) -> tuple[torch.Tensor, float]:
    return _plain(rope.theta, head_size), 1.0


def _linear(rope: RopeParameters, head_size: int, max_model_len: int) -> tuple[torch.Tensor, float]:
    return _plain(rope.theta, head_size) / rope.number("factor"), 1.0


def _dynamic(
    rope: RopeParameters, head_size: int, max_model_len: int
) -> tuple[torch.Tensor, float]:
    factor, length = rope.number("factor"), max(max_model_len, rope.max_positions)
    stretch = factor * length / rope.max_positions - (factor - 1)
    return _plain(rope.theta * stretch ** (head_size / (head_size - 2)), head_size), 1.0


def _llama3(rope: RopeParameters, head_size: int, max_model_len: int) -> tuple[torch.Tensor, float]:
    factor, low, high = (rope.number(n) for n in ("factor", "low_freq_factor", "high_freq_factor"))
    plain = _plain(rope.theta, head_size)
    turns = rope.original_length() * plain / (2 * math.pi)  # within the original length
    share = ((turns - low) / (high - low)).clamp(0, 1)  # of the frequency that stays as it is
    return (1 - share) * plain / factor + share * plain, 1.0


def _yarn(rope: RopeParameters, head_size: int, max_model_len: int) -> tuple[torch.Tensor, float]:
    original = rope.original_length()
    given = rope.values.get("factor")
    factor = rope.max_positions / original if given is None else rope.number("factor")
    fast, slow = (float(rope.values.get(n) or d) for n, d in (("beta_fast", 32), ("beta_slow", 1)))

    def dimension(turns: float) -> float:
        """The dimension that makes this many turns within the original length."""
        return head_size * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    first, last = dimension(fast), dimension(slow)
    if rope.values.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_size - 1)
    ramp = (torch.arange(head_size // 2, dtype=torch.float) - first) / ((last - first) or 0.001)
    squeezed = ramp.clamp(0, 1)
    plain = _plain(rope.theta, head_size)
    return plain / factor * squeezed + plain * (1 - squeezed), _yarn_attention(rope, factor)


def _yarn_attention(rope: RopeParameters, factor: float) -> float:
    def scale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if rope.values.get("attention_factor") is not None:
        return rope.number("attention_factor")
    if rope.values.get("mscale") and rope.values.get("mscale_all_dim"):
        return scale(rope.number("mscale")) / scale(rope.number("mscale_all_dim"))
    return scale(1.0)


Frequencies = Callable[[RopeParameters, int, int], tuple[torch.Tensor, float]]
FREQUENCIES: dict[str, Frequencies] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
}
