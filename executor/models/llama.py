"""The Llama family: RMSNorm, rotary attention with grouped heads, gated feed-forward.

What a member is, and nothing of how it runs: executor/cpu_decoder.py runs what is declared here.
What sets a member apart is in its `Family` at the end, or, where it has
more of its own, in a file of its own (gemma3.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...mq.errors import ModelLoadError
from .. import rope
from ..quantization import read_quantization

SLIDING = "sliding_attention"
# Before the feed-forward layer, after attention, and after the feed-forward layer.
SANDWICH = ("pre_feedforward_layernorm", "post_attention_layernorm", "post_feedforward_layernorm")


@dataclass(frozen=True)
class Family:
    """What config.json of a member leaves unsaid.

    A bias of None is as config.json says. head_size and sliding_window are what holds where it has
    none (None: hidden size / heads, no window). always_sliding: all layers have the window;
    otherwise use_sliding_window and layer_types tell.
    """

    qkv_bias: bool | None
    output_bias: bool | None
    mlp_bias: bool | None
    qk_norm: bool = False
    head_size: int | None = None
    sliding_window: int | None = None
    always_sliding: bool = False

    def check(self, hf_config: dict[str, Any]) -> LlamaConfig:
        return LlamaConfig(self, hf_config)


@dataclass(frozen=True)
class Experts:
    """The mixture of experts that some layers have instead of a feed-forward layer: a router gives
    each token to `chosen` of `num` experts, whose results are added up by its weights.

    inner_size: of one expert. first, held: those that are here, all but on a rank of several; after
    the last one comes the first one again.
    renormalize: the weights of the chosen ones add up to one; otherwise each is its share among
    all. sparse: for each layer, whether it has experts. names: of the block in its layer, and of an
    expert's gate, up and down.
    """

    num: int
    chosen: int
    inner_size: int
    renormalize: bool
    sparse: tuple[bool, ...]
    block: str
    names: tuple[str, str, str]
    first: int
    held: int


class LlamaConfig:
    """config.json, checked. Raises ModelLoadError naming what is missing or not supported.

    quantization: how the checkpoint's linear layers are, but for the head's; None: not at all.
    norm_offset: added to the weights of norms. sandwich: what a block adds to the residual stream
    has a norm of its own. ropes: the kinds of rotation, and rope_of: each layer's. windows: each
    layer's sliding window, 0 for none. experts: None where every layer is dense.
    """

    activation = "silu"  # or "gelu_tanh"
    norm_offset = 0.0
    sandwich = False
    embedding_scale = 1.0
    experts: Experts | None = None

    def __init__(self, family: Family, hf: dict[str, Any]) -> None:
        def whole(name: str, default: int | None = None) -> int:
            value = hf.get(name)
            value = default if value is None else value
            if not isinstance(value, int) or value < 1:
                raise ModelLoadError(
                    f"config.json: {name} must be a positive integer, got {value!r}"
                )
            return value

        def either(declared: bool | None, name: str) -> bool:
            return bool(hf.get(name, False)) if declared is None else declared

        self._check_activation(hf)
        self.quantization = read_quantization(hf)
        self.vocab_size = whole("vocab_size")
        self.hidden_size = whole("hidden_size")
        self.intermediate_size = whole("intermediate_size")
        self.num_layers = whole("num_hidden_layers")
        self.heads = whole("num_attention_heads")
        self.kv_heads = whole("num_key_value_heads", self.heads)
        self.head_size = whole("head_dim", family.head_size or self.hidden_size // self.heads)
        if self.heads % self.kv_heads or self.head_size % 2:
            raise ModelLoadError(
                f"config.json: {self.heads} heads in {self.kv_heads} groups of head size "
                f"{self.head_size}: heads must be a multiple of num_key_value_heads, and the head "
                "size even"
            )
        self.eps = float(hf.get("rms_norm_eps", 1e-6))
        self.tied = bool(hf.get("tie_word_embeddings", False))
        self.qkv_bias = either(family.qkv_bias, "attention_bias")
        self.output_bias = either(family.output_bias, "attention_bias")
        self.mlp_bias = either(family.mlp_bias, "mlp_bias")
        self.qk_norm = family.qk_norm
        self.attention_scale = self.head_size**-0.5
        self.windows = self._windows(family, hf)
        self.ropes = self._ropes(hf)
        self.rope_of = [0] * self.num_layers

    def is_sparse(self, layer: int) -> bool:
        return self.experts is not None and self.experts.sparse[layer]

    @property
    def dense_size(self) -> int:
        """intermediate_size; 0 where no layer is dense."""
        return 0 if self.experts and all(self.experts.sparse) else self.intermediate_size

    def _check_activation(self, hf: dict[str, Any]) -> None:
        require(hf, "hidden_act", "silu")

    def _ropes(self, hf: dict[str, Any]) -> list[rope.RopeParameters]:
        return [rope.read_parameters(hf)]

    def _windows(self, family: Family, hf: dict[str, Any]) -> list[int]:
        layers = self.num_layers
        window = hf.get("sliding_window", family.sliding_window) or 0
        if family.always_sliding:
            return [window] * layers
        if not hf.get("use_sliding_window", False):
            return [0] * layers
        first = hf.get("max_window_layers", 28)
        types = hf.get("layer_types") or [
            SLIDING if i >= first else "full_attention" for i in range(layers)
        ]
        return [window if kind == SLIDING else 0 for kind in types]


def require(hf: dict[str, Any], name: str, supported: Any) -> None:
    """Raise ModelLoadError where config.json says otherwise."""
    value = hf.get(name)
    if value is not None and value != supported:
        raise ModelLoadError(f"config.json: {name} {value!r} is not supported; {supported!r} is")


LLAMA = Family(qkv_bias=None, output_bias=None, mlp_bias=None)
MISTRAL = Family(
    qkv_bias=False, output_bias=False, mlp_bias=False, always_sliding=True, sliding_window=4096
)
QWEN2 = Family(qkv_bias=True, output_bias=False, mlp_bias=False, sliding_window=4096)
QWEN3 = Family(
    qkv_bias=None,
    output_bias=None,
    mlp_bias=False,
    qk_norm=True,
    head_size=128,
    sliding_window=4096,
)
