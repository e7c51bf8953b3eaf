"""Takes a model's weights from a source to the device, each layer of the kind that its scheme says
(linears.py).

Queries, keys and values are one linear layer, and so are gate and up: their parts lie one below the
other. A part that a quantised checkpoint left in 16 bits is known by its tensors; the parts of one
layer must be alike.

Legend: K inputs, N outputs, G groups of inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from ...kernels.gpu.fp8_linear import ALIGNMENT, FP8, quantize_weight
from ...kernels.gpu.int4_linear import Int4Weight
from ...mq.errors import ConfigError, ModelLoadError
from ..models.llama import SANDWICH, LlamaConfig
from ..quantization import Fp8Checkpoint, Int4Checkpoint
from ..weights import WeightSource, take_experts
from .experts import ExpertWeights
from .int4_checkpoints import read_int4
from .linears import AnyLinear, Fp8Linear, Int4Linear, Linear, Workspace
from .schemes import Fp8AtLoad, Scheme

# What checkpoints call the scale of a layer's cached keys, below self_attn; values alike.
CACHE_SCALES = ("k_scale", "attn.k_scale", "k_proj.k_scale", "k_proj.output_scale")


class Layer(NamedTuple):
    """The weights of one layer, and where it is: its group of layers, its place there, its window,
    its rotation. mlp: gate and up as one, and down. Norms are float32, and those that a model
    doesn't have None. The scales are of what is in the KV cache.
    """

    input_norm: torch.Tensor
    qkv: AnyLinear
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    output: AnyLinear
    attention_update_norm: torch.Tensor | None
    mlp_norm: torch.Tensor
    mlp: tuple[AnyLinear, AnyLinear] | ExpertWeights
    mlp_update_norm: torch.Tensor | None
    group: int
    place: int
    window: int
    rope: int
    k_scale: float
    v_scale: float

    @property
    def gate_up(self) -> AnyLinear:
        assert not isinstance(self.mlp, ExpertWeights)
        return self.mlp[0]

    @property
    def down(self) -> AnyLinear:
        assert not isinstance(self.mlp, ExpertWeights)
        return self.mlp[1]

    @property
    def linears(self) -> tuple[AnyLinear, ...]:
        mlp = () if isinstance(self.mlp, ExpertWeights) else self.mlp
        return self.qkv, self.output, *mlp


class WeightReader:
    """scales_cache: whether the KV cache has the checkpoint's scales."""

    def __init__(
        self,
        c: LlamaConfig,
        source: WeightSource,
        dtype: torch.dtype,
        device: torch.device,
        scheme: Scheme | None = None,
        scales_cache: bool = False,
    ) -> None:
        self._c, self._source, self._dtype, self._device = c, source, dtype, device
        self._scheme, self._scales_cache = scheme, scales_cache
        self.workspace = Workspace()
        self.num_bytes = self._mixtures = 0

    def stack(self, names: dict[str, int], inputs: int | None = None) -> torch.Tensor:
        """Tensors of so many rows each, one below the other."""
        tail = () if inputs is None else (inputs,)
        whole = self._empty((sum(names.values()), *tail), self._dtype)
        first = 0
        for name, rows in names.items():
            whole[first : first + rows].copy_(self._source.take(name, (rows, *tail)))
            first += rows
        return whole

    def _empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        whole = torch.empty(shape, dtype=dtype, device=self._device)
        self.num_bytes += whole.nbytes
        return whole

    def norm(self, name: str, size: int) -> torch.Tensor:
        weight = self._source.take(f"{name}.weight", (size,)).to(self._device, torch.float32)
        return weight + self._c.norm_offset

    # --- linear layers

    def linear(self, prefix: str, names: dict[str, int], inputs: int, bias: bool) -> AnyLinear:
        parts = {prefix + name: rows for name, rows in names.items()}
        read = self._kind(list(parts))
        weights = read(parts, inputs)
        self._drop_zero_biases(list(parts), bias)
        biases = {f"{name}.bias": rows for name, rows in parts.items()}
        return weights._replace(bias_N=self.stack(biases) if bias else None)

    def _kind(self, names: list[str]) -> Callable[[dict[str, int], int], AnyLinear]:
        scheme = self._scheme
        if scheme is None:
            return self._plain
        if isinstance(scheme, Fp8AtLoad):
            return self._fp8_at_load
        is_int4 = isinstance(scheme, Int4Checkpoint)
        suffix = "qweight" if is_int4 else "weight_scale"
        quantized = [self._source.has(f"{name}.{suffix}") for name in names]
        if len({*quantized}) > 1:
            having, lacking = names[quantized.index(True)], names[quantized.index(False)]
            raise ModelLoadError(
                f"{having!r} is quantized and {lacking!r} isn't; they are one linear layer here"
            )
        if not quantized[0] and (not is_int4 or self._source.has(f"{names[0]}.weight")):
            return self._plain
        return self._int4_checkpoint if is_int4 else self._fp8_checkpoint

    def _drop_zero_biases(self, names: list[str], bias: bool) -> None:
        """GPTQ's tools write a bias of zeros where a model has none."""
        if bias or not isinstance(self._scheme, Int4Checkpoint):
            return
        for name in names:
            if self._source.has(f"{name}.bias") and self._source.take(f"{name}.bias", None).any():
                raise ModelLoadError(
                    f"tensor '{name}.bias' isn't zero, and config.json has no bias"
                )

    def _plain(self, parts: dict[str, int], inputs: int) -> Linear:
        return Linear(self.stack({f"{n}.weight": r for n, r in parts.items()}, inputs), None)

    def _fp8_at_load(self, parts: dict[str, int], inputs: int) -> Fp8Linear:
        def read(name: str, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
            weight = self._source.take(f"{name}.weight", (rows, inputs))
            # As the model's type has it, which is what the checkpoint would have been served in.
            return quantize_weight(weight.to(self._device, self._dtype))

        return self._fp8(parts, inputs, read, None)

    def _fp8_checkpoint(self, parts: dict[str, int], inputs: int) -> Fp8Linear:
        def read(name: str, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
            weight = self._source.take(f"{name}.weight", (rows, inputs), dtype=FP8)
            return weight, self._scale(f"{name}.weight_scale", rows).expand(rows)

        assert isinstance(self._scheme, Fp8Checkpoint)
        input_scale = None
        if not self._scheme.dynamic:
            # The parts see the same activations; the widest range holds for all.
            scales = [self._scale(f"{name}.input_scale", 1) for name in parts]
            input_scale = torch.stack(scales).amax(0).to(self._device)
        return self._fp8(parts, inputs, read, input_scale)

    def _fp8(
        self,
        parts: dict[str, int],
        inputs: int,
        read: Callable[[str, int], tuple[torch.Tensor, torch.Tensor]],
        input_scale: torch.Tensor | None,
    ) -> Fp8Linear:
        outputs, first = sum(parts.values()), 0
        if inputs % ALIGNMENT or outputs % ALIGNMENT:
            raise ModelLoadError(
                f"{', '.join(parts)}: {outputs} outputs of {inputs} inputs; products of fp8 take "
                f"multiples of {ALIGNMENT}"
            )
        weight_NK = self._empty((outputs, inputs), FP8)
        scale_N = self._empty((outputs,), torch.float32)
        for name, rows in parts.items():
            weight, scale = read(name, rows)
            weight_NK[first : first + rows].copy_(weight)
            scale_N[first : first + rows].copy_(scale)
            first += rows
        self.workspace.need_fp8(inputs)
        return Fp8Linear(weight_NK, None, scale_N, input_scale, self.workspace)

    def _scale(self, name: str, rows: int) -> torch.Tensor:
        """Float32 [1] or [rows]."""
        scale = self._source.take(name, None).float().flatten()
        if len(scale) not in (1, rows):
            raise ModelLoadError(
                f"tensor {name!r} has {len(scale)} numbers; it must have 1 or {rows}"
            )
        if not ((scale > 0) & scale.isfinite()).all():
            raise ModelLoadError(f"tensor {name!r} has a scale that isn't positive and finite")
        return scale

    def _int4_checkpoint(self, parts: dict[str, int], inputs: int) -> Int4Linear:
        assert isinstance(self._scheme, Int4Checkpoint)
        read = [
            read_int4(self._source, self._scheme, name, rows, inputs, self._device)
            for name, rows in parts.items()
        ]
        weight = Int4Weight(
            torch.cat([part.packed_NK2 for part in read]),
            torch.cat([part.scales_GN for part in read], 1),
            torch.cat([part.zeros_GN for part in read], 1),
        )
        self.num_bytes += weight.nbytes
        self.workspace.need_int4(weight.outputs * weight.inputs)
        return Int4Linear(weight, None, self.workspace)

    # --- a layer

    def layer(self, index: int, group: int, place: int) -> Layer:
        c, prefix = self._c, f"model.layers.{index}."
        q, kv, hidden = c.heads * c.head_size, c.kv_heads * c.head_size, c.hidden_size
        attention = f"{prefix}self_attn."
        before_mlp, *after = SANDWICH if c.sandwich else ("post_attention_layernorm", None, None)
        updates = [self.norm(prefix + name, hidden) if name else None for name in after]
        head_norms = [
            self.norm(attention + name, c.head_size) if c.qk_norm else None
            for name in ("q_norm", "k_norm")
        ]
        return Layer(
            input_norm=self.norm(f"{prefix}input_layernorm", hidden),
            qkv=self.linear(
                attention, {"q_proj": q, "k_proj": kv, "v_proj": kv}, hidden, c.qkv_bias
            ),
            q_norm=head_norms[0],
            k_norm=head_norms[1],
            output=self.linear(attention, {"o_proj": hidden}, q, c.output_bias),
            attention_update_norm=updates[0],
            mlp_norm=self.norm(prefix + before_mlp, hidden),
            mlp=self._experts(prefix) if c.is_sparse(index) else self._dense(prefix),
            mlp_update_norm=updates[1],
            group=group,
            place=place,
            window=c.windows[index],
            rope=c.rope_of[index],
            k_scale=self._cache_scale(attention, "k"),
            v_scale=self._cache_scale(attention, "v"),
        )

    def _dense(self, layer: str) -> tuple[AnyLinear, AnyLinear]:
        c, mlp = self._c, f"{layer}mlp."
        inner, hidden, bias = c.intermediate_size, c.hidden_size, c.mlp_bias
        gate_up = self.linear(mlp, {"gate_proj": inner, "up_proj": inner}, hidden, bias)
        return gate_up, self.linear(mlp, {"down_proj": hidden}, inner, bias)

    def _experts(self, layer: str) -> ExpertWeights:
        experts, hidden = self._c.experts, self._c.hidden_size
        assert experts is not None
        if isinstance(self._scheme, Fp8AtLoad):
            raise ConfigError(
                "quantization = 'fp8': a mixture of experts isn't quantized on device 'cuda'; it "
                "takes 'none'"
            )
        if self._scheme is not None:
            raise ModelLoadError(
                f"config.json: quantized weights (quantization_config: {self._scheme}) are not "
                "supported in a mixture of experts; those of 16 bits are"
            )
        router = self.stack({f"{layer}{experts.block}gate.weight": experts.num}, hidden)
        inner = experts.inner_size
        gate_up_ENH = self._empty((experts.held, 2 * inner, hidden), self._dtype)
        down_EHI = self._empty((experts.held, hidden, inner), self._dtype)
        for i, (gate, up, down) in enumerate(take_experts(self._source, experts, hidden, layer)):
            gate_up_ENH[i, :inner].copy_(gate)
            gate_up_ENH[i, inner:].copy_(up)
            down_EHI[i].copy_(down)
        self._mixtures += 1
        return ExpertWeights(Linear(router, None), gate_up_ENH, down_EHI, self._mixtures - 1)

    def _cache_scale(self, attention: str, which: str) -> float:
        """1.0 where there is none, or where the cache keeps the model's type."""
        for name in CACHE_SCALES:
            name = attention + name.replace("k_", f"{which}_")
            if self._source.has(name):
                scale = self._scale(name, 1).item()
                return scale if self._scales_cache else 1.0
        return 1.0
