"""Mixtral: Mistral's layers with a mixture of experts in each, of which every token has some.

A layer's window is as config.json says, and none where it says nothing. intermediate_size is an
expert's; the weights of a token's experts add up to one.
"""

from __future__ import annotations

from typing import Any

from ...mq.errors import ModelLoadError
from .llama import Experts, Family, LlamaConfig, require


class MixtralConfig(LlamaConfig):
    def __init__(self, family: Family, hf: dict[str, Any]) -> None:
        super().__init__(
            family, {"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6} | hf
        )
        num, chosen = read_experts(hf, "num_local_experts", 8, 2)
        self.experts = Experts(
            num=num,
            chosen=chosen,
            inner_size=self.intermediate_size,
            renormalize=True,
            sparse=(True,) * self.num_layers,
            block="block_sparse_moe.",
            names=("w1", "w3", "w2"),
            first=0,
            held=num,
        )


def read_experts(
    hf: dict[str, Any], name: str, default: int, default_chosen: int
) -> tuple[int, int]:
    """How many experts a layer has, by this name in config.json, and how many of them a token has.
    Raises ModelLoadError for what is no number of either, and for experts that all tokens share.
    """
    require(hf, "num_shared_experts", 0)
    require(hf, "n_shared_experts", 0)
    require(hf, "shared_expert_intermediate_size", 0)
    num = read_count(hf, name, default)
    chosen = read_count(hf, "num_experts_per_tok", default_chosen)
    if chosen > num:
        raise ModelLoadError(
            f"config.json: num_experts_per_tok must be at most {name}, which is {num}, got {chosen}"
        )
    return num, chosen


def read_count(hf: dict[str, Any], name: str, default: int) -> int:
    value = hf.get(name)
    value = default if value is None else value
    if type(value) is not int or value < 1:
        raise ModelLoadError(f"config.json: {name} must be a positive integer, got {value!r}")
    return value


class MixtralFamily(Family):
    def check(self, hf_config: dict[str, Any]) -> MixtralConfig:
        return MixtralConfig(self, hf_config)


MIXTRAL = MixtralFamily(qkv_bias=False, output_bias=False, mlp_bias=False, always_sliding=True)
