"""Gemma 3, text only: what sets it apart from Llama (llama.py, which it runs on).

norms         weights count from 1; queries and keys have them; what a block adds to the
              residual stream goes through one of its own ("sandwich")
feed-forward  gelu (by tanh) instead of silu
embedding     times the square root of the hidden size
attention     scaled by query_pre_attn_scalar; most layers see a sliding window only, and have a
              RoPE of their own, with a shorter base and no scaling
"""

from __future__ import annotations

from typing import Any

from ...mq.errors import ModelLoadError
from .. import rope
from .llama import SLIDING, Family, LlamaConfig, require

FULL = "full_attention"
_ABSENT = ("attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention")


class Gemma3Config(LlamaConfig):
    """Reads the layout of transformers 5 (rope_parameters by kind of layer) and the one before."""

    activation = "gelu_tanh"
    norm_offset = 1.0
    sandwich = True

    def __init__(self, family: Family, hf: dict[str, Any]) -> None:
        for name in _ABSENT:
            if hf.get(name):
                raise ModelLoadError(f"config.json: {name} {hf[name]!r} is not supported")
        super().__init__(family, {"tie_word_embeddings": True} | hf)
        scalar = hf.get("query_pre_attn_scalar", 256)
        if isinstance(scalar, bool) or not isinstance(scalar, int | float) or scalar <= 0:
            raise ModelLoadError(
                f"config.json: query_pre_attn_scalar must be a positive number, got {scalar!r}"
            )
        self.attention_scale = scalar**-0.5
        self.embedding_scale = self.hidden_size**0.5
        self.rope_of = [1 if kind == SLIDING else 0 for kind in self._kinds(hf)]

    def _check_activation(self, hf: dict[str, Any]) -> None:
        require(hf, "hidden_activation", "gelu_pytorch_tanh")

    def _kinds(self, hf: dict[str, Any]) -> list[str]:
        """Of attention, by layer: every sliding_window_pattern-th is full where none are given."""
        pattern = hf.get("sliding_window_pattern") or hf.get("_sliding_window_pattern") or 6
        kinds = hf.get("layer_types") or [
            SLIDING if (i + 1) % pattern else FULL for i in range(self.num_layers)
        ]
        if len(kinds) != self.num_layers or not {*kinds} <= {SLIDING, FULL}:
            raise ModelLoadError(
                f"config.json: layer_types must name one of {SLIDING!r} and {FULL!r} for each of "
                f"{self.num_layers} layers, got {kinds!r}"
            )
        return kinds

    def _windows(self, family: Family, hf: dict[str, Any]) -> list[int]:
        window = hf.get("sliding_window", family.sliding_window) or 0
        return [window if kind == SLIDING else 0 for kind in self._kinds(hf)]

    def _ropes(self, hf: dict[str, Any]) -> list[rope.RopeParameters]:
        """Of full layers and of sliding ones."""
        given = hf.get("rope_parameters") or {}
        full = {"rope_theta": hf.get("rope_theta") or 1e6, **(hf.get("rope_scaling") or {})}
        sliding = {"rope_theta": hf.get("rope_local_base_freq") or 1e4}
        rest = {name: hf[name] for name in hf if name not in ("rope_scaling", "rope_theta")}
        return [
            rope.read_parameters(rest | {"rope_parameters": old | (given.get(kind) or {})})
            for kind, old in ((FULL, full), (SLIDING, sliding))
        ]


class Gemma3Family(Family):
    def check(self, hf_config: dict[str, Any]) -> Gemma3Config:
        return Gemma3Config(self, hf_config)


GEMMA3 = Gemma3Family(
    qkv_bias=None,
    output_bias=None,
    mlp_bias=False,
    qk_norm=True,
    head_size=256,
    sliding_window=4096,
)
