"""Qwen3 with a mixture of experts: Qwen3's attention, and experts in the layers that
decoder_sparse_step and mlp_only_layers leave to them. The other layers are Qwen3's own.

The weights of a token's experts add up to one where norm_topk_prob says so. With
use_sliding_window every layer has the window.
"""

from __future__ import annotations

from typing import Any

from ...mq.errors import ModelLoadError
from .llama import Experts, Family, LlamaConfig
from .mixtral import read_count, read_experts


class Qwen3MoeConfig(LlamaConfig):
    def __init__(self, family: Family, hf: dict[str, Any]) -> None:
        super().__init__(family, {"intermediate_size": 6144} | hf)
        name = "num_local_experts" if hf.get("num_local_experts") is not None else "num_experts"
        num, chosen = read_experts(hf, name, 128, 8)
        sparse = self._sparse(hf)
        if not any(sparse):
            raise ModelLoadError(
                "config.json: decoder_sparse_step and mlp_only_layers leave no layer with experts"
            )
        self.experts = Experts(
            num=num,
            chosen=chosen,
            inner_size=read_count(hf, "moe_intermediate_size", 768),
            renormalize=bool(hf.get("norm_topk_prob", False)),
            sparse=sparse,
            block="mlp.",
            names=("gate_proj", "up_proj", "down_proj"),
            first=0,
            held=num,
        )

    def _sparse(self, hf: dict[str, Any]) -> tuple[bool, ...]:
        step, dense = read_count(hf, "decoder_sparse_step", 1), hf.get("mlp_only_layers") or []
        layers = range(self.num_layers)
        if not isinstance(dense, list) or not all(type(i) is int and i in layers for i in dense):
            raise ModelLoadError(
                "config.json: mlp_only_layers must be a list of layers from 0 to "
                f"{self.num_layers - 1}, got {dense!r}"
            )
        return tuple(i not in dense and (i + 1) % step == 0 for i in layers)

    def _windows(self, family: Family, hf: dict[str, Any]) -> list[int]:
        window = hf.get("sliding_window", family.sliding_window) or 0
        return [window if hf.get("use_sliding_window", False) else 0] * self.num_layers


class Qwen3MoeFamily(Family):
    def check(self, hf_config: dict[str, Any]) -> Qwen3MoeConfig:
        return Qwen3MoeConfig(self, hf_config)


QWEN3_MOE = Qwen3MoeFamily(
    qkv_bias=None,
    output_bias=None,
    mlp_bias=False,
    qk_norm=True,
    sliding_window=4096,
)
