"""The forward pass of the Llama family on a processor, as its declaration says (executor/models/),
with a residual stream in float32.

A rank of several runs its part of the model (sharding.py). The ranks add up what they have after
the embedding, attention's output and the feed-forward layer, and the logits come together on the
output rank: by operations among the others (parallel.py). So does a stage of several (pipeline.py)
take the residual stream and hand it on.

Legend: T tokens, H hidden size, Q = query heads x head size, N = outputs of a product (padded), D
head size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

from ..kernels.cpu.activation import gelu_mul_kernel, silu_mul_kernel
from ..kernels.cpu.exchange import exchange_kernel
from ..kernels.cpu.norm import add_rms_norm_kernel
from ..kernels.cpu.openmp import Kernel
from ..kernels.cpu.rope import rope_and_cache
from . import pipeline, rope
from .attention import AttentionBackend, Geometry, choose_backend
from .expert_routes import Routes
from .experts import ExpertBuffers, Mixture, expert_kernels
from .input_batch import InputBatch, Step
from .layers import Embedding, Layout, Linear
from .lockstep import Replicas
from .models.llama import SANDWICH, LlamaConfig
from .parallel import Alone, Group
from .pipeline import Stage
from .program import Operation, Program
from .sharding import Sharding
from .stages import deal_stage, may_be_left
from .weights import WeightSource

ACTIVATIONS = {"silu": silu_mul_kernel, "gelu_tanh": gelu_mul_kernel}


class _Layer:
    """The weights of one layer, in the order in which they are used. It has a mixture of experts,
    or gate_up and down.
    """

    def __init__(
        self,
        c: LlamaConfig,
        layout: Layout,
        source: WeightSource,
        prefix: str,
        routes: Routes | None,
    ) -> None:
        """routes: of its experts, if it has some."""

        def linear(names: dict[str, int], inputs: int, bias: bool) -> Linear:
            parts = [
                source.take(f"{prefix}{n}.weight", (size, inputs)) for n, size in names.items()
            ]
            biases = [
                source.take(f"{prefix}{n}.bias", (size,)) for n, size in names.items() if bias
            ]
            return layout.linear(parts, biases)

        def norm(name: str, size: int) -> torch.Tensor:
            return source.take(f"{prefix}{name}.weight", (size,)).float() + c.norm_offset

        q_size, kv_size = c.heads * c.head_size, c.kv_heads * c.head_size
        attention, mlp = "self_attn.", "mlp."
        self.input_norm = norm("input_layernorm", c.hidden_size)
        self.qkv = linear(
            {
                attention + "q_proj": q_size,
                attention + "k_proj": kv_size,
                attention + "v_proj": kv_size,
            },
            c.hidden_size,
            c.qkv_bias,
        )
        self.qk_norms: tuple[torch.Tensor, torch.Tensor] | None = None
        if c.qk_norm:
            self.qk_norms = (
                norm(attention + "q_norm", c.head_size),
                norm(attention + "k_norm", c.head_size),
            )
        self.output = linear({attention + "o_proj": c.hidden_size}, q_size, c.output_bias)
        names = SANDWICH if c.sandwich else ("post_attention_layernorm", None, None)
        self.mlp_norm = norm(names[0], c.hidden_size)
        self.attention_update_norm, self.mlp_update_norm = (
            norm(name, c.hidden_size) if name else None for name in names[1:]
        )
        self.mixture: Mixture | None = None
        if routes is not None:
            self.mixture = Mixture(c, layout, source, prefix, routes)
            return
        self.gate_up = linear(
            {mlp + "gate_proj": c.intermediate_size, mlp + "up_proj": c.intermediate_size},
            c.hidden_size,
            c.mlp_bias,
        )
        self.down = linear({mlp + "down_proj": c.hidden_size}, c.intermediate_size, c.mlp_bias)

    @property
    def num_bytes(self) -> int:
        if self.mixture is not None:
            mlp = self.mixture.num_bytes
        else:
            mlp = self.gate_up.num_bytes + self.down.num_bytes
        return self.qkv.num_bytes + self.output.num_bytes + mlp


class Update(NamedTuple):
    """What the norm that follows adds to the residual stream, and the norm that this has before."""

    value_TH: torch.Tensor | None
    norm_H: torch.Tensor | None


class CpuDecoder:
    """Weights first (the constructor), then the cache and the buffers (`bind`), then `forward` for
    every step.
    """

    def __init__(
        self,
        config: LlamaConfig,
        layout: Layout,
        block_size: int,
        source: WeightSource,
        progress: Callable[[int, int], None],
        group: Group | None = None,
        by_expert: bool = False,
        stage: Stage | None = None,
        replicas: Replicas | None = None,
        redundant: int = 0,
        cache_dtype: torch.dtype | None = None,
    ) -> None:
        """config, source: of the whole model; a rank of `group` has its part of it (by_expert,
        redundant: sharding.py), and a stage its layers. replicas: those that have the other
        experts. cache_dtype: of the KV cache, the weights' by default. Raises ConfigError where it
        can't be split so.
        """
        self._group, self._stage = group or Alone(), stage or Stage()
        self._vocab_size = config.vocab_size
        self._replicas = replicas
        dealt = (replicas.rank, replicas.size) if replicas is not None else None
        own = self._group
        sharding = Sharding(config, own.rank, own.size, by_expert, dealt, redundant)
        c, source = sharding.local, sharding.weights(source)
        self._config, self._layout = c, layout
        self._numbers = self._stage.position.layers(c.num_layers)
        self.groups = deal_stage(c.windows, self._numbers)
        self.geometry = Geometry(
            layout.dtype,
            cache_dtype or layout.weight_dtype,
            max(len(group.layers) for group in self.groups),
            c.kv_heads,
            c.heads // c.kv_heads,
            c.head_size,
            block_size,
            c.attention_scale,
        )
        self._backend = choose_backend(self.geometry)
        self._take_ends(source, sharding.parts["vocab_size"].start)
        self._layers = []
        for done, i in enumerate(self._numbers):
            progress(done, len(self._numbers))
            prefix = f"model.layers.{i}."
            routes = None
            if c.experts is not None and c.is_sparse(i):
                routes = Routes(c.experts.num, sharding.placement, sharding.place)
            self._layers.append(_Layer(c, self._layout, source, prefix, routes))
        source.finish(self._is_of_others)
        progress(len(self._numbers), len(self._numbers))

    def _take_ends(self, source: WeightSource, first_token: int) -> None:
        """The embedding on the first stage, the last norm and the head on the last one. Where they
        are tied both have the table.
        """
        c, layout, stage = self._config, self._layout, self._stage
        shape = c.vocab_size, c.hidden_size
        self._head: Linear | None = None
        self._embedding: Embedding | None = None
        self._shares = stage.position.count == 1 and c.tied and layout.ties()
        if stage.is_first or (c.tied and stage.is_last):
            table = source.take("model.embed_tokens.weight", shape)
        if stage.is_last:
            head = table if c.tied else source.take("lm_head.weight", shape)
            self._head = layout.linear([head], is_head=True)
            norm = source.take("model.norm.weight", (c.hidden_size,))
            self._final_norm = norm.float() + c.norm_offset
        if stage.is_first:
            self._embedding = Embedding(
                layout,
                None if self._shares else table,
                self._head if self._shares else None,
                first_token,
            )

    def _is_of_others(self, name: str) -> bool:
        """Whether a weight that nobody has taken may be there."""
        c = self._config
        return may_be_left(name, self._numbers, c.num_layers, c.tied)

    def kernels(self) -> list[Kernel]:
        """Every kernel that `bind` binds."""
        own = [ACTIVATIONS[self._config.activation], self._backend.kernel]
        if self._replicas is not None:
            own += self._replicas.kernels()
        elif self._group.size > 1:
            own += [exchange_kernel]
        own += expert_kernels(self._layout) if self._config.experts is not None else []
        own += pipeline.KERNELS if self._stage.position.count > 1 else []
        return [add_rms_norm_kernel, rope_and_cache, *own, *self._layout.kernels(self._shares)]

    def num_bytes(self) -> int:
        """Of the weights."""
        ends = [end for end in (self._embedding, self._head) if end is not None]
        return sum(weights.num_bytes for weights in (*ends, *self._layers))

    def mixtures(self) -> dict[int, Mixture]:
        """By the number of their layer."""
        layers = zip(self._numbers, self._layers, strict=True)
        return {i: layer.mixture for i, layer in layers if layer.mixture is not None}

    def describe(self) -> dict[str, str]:
        return {"linear": self._layout.describe(), "attention": self._backend.name}

    def bind(self, batch: InputBatch, max_model_len: int, num_blocks: int) -> AttentionBackend:
        """Make the cache and the buffers for `batch`, and bind every operation to them."""
        self._batch, c, pad = batch, self._config, self._layout.padded
        tokens, dtype = len(batch.token_ids), self.geometry.dtype
        self._rotations = [
            rope.Rotation(each, c.head_size, max_model_len, tokens) for each in c.ropes
        ]
        self._hidden_TH = torch.zeros(tokens, c.hidden_size)
        self._x_TH = torch.zeros(tokens, pad(c.hidden_size), dtype=dtype)
        self._x_TQ = torch.zeros(tokens, pad(c.heads * c.head_size), dtype=dtype)
        self._x_TI = torch.zeros(tokens, pad(c.dense_size), dtype=dtype)
        self._update_TH = torch.zeros(tokens, pad(c.hidden_size))
        # What isn't read before it is written isn't cleared, so its pages become real as they are
        # needed.
        self._wide_TN = torch.empty(tokens, max(self._layers[0].qkv.width, pad(2 * c.dense_size)))
        if c.experts is not None:
            self.experts = ExpertBuffers(
                self._layout, c.experts, c.hidden_size, tokens, self._replicas
            )
        self._gathered_SV: torch.Tensor | None = None
        self._attention = self._backend(self.geometry, batch, max_model_len, num_blocks)
        rows = np.zeros(1, np.int64)
        update, body = self._bind_layers(rows)
        self._body = Program(rows, [*self._bind_start(rows), *body, *self._bind_end(rows, update)])
        self._tail = None if self._head is None else self._bind_logits(self._head, update)
        return self._attention

    def _bind_start(self, rows: np.ndarray) -> list[Operation]:
        """From tokens, or from the stage before, to the residual stream."""
        if self._embedding is None:
            return [self._stage.receive(rows, self._hidden_TH)]
        # The embedding is scaled by what the model's own type makes of the scale.
        scale = float(torch.tensor(self._config.embedding_scale, dtype=self._layout.weight_dtype))
        return [
            self._embedding.bind(rows, self._batch.token_ids, self._hidden_TH, scale),
            *self._group.sum(rows, self._hidden_TH),
        ]

    def _bind_layers(self, rows: np.ndarray) -> tuple[Update, list[Operation]]:
        """What the last one is still to add, and their operations."""
        operations: list[Operation] = []
        update = Update(None, None)
        places = {
            layer: (g, place)
            for g, group in enumerate(self.groups)
            for place, layer in enumerate(group.layers)
        }
        shared: list[Operation] = []
        for i, layer in zip(self._numbers, self._layers, strict=True):
            mlp, value_TH = self._bind_mlp(layer, rows)
            shared += mlp if value_TH is not self._update_TH else []
            operations += [*self._bind_attention(i, *places[i], layer, rows, update), *mlp]
            update = Update(value_TH, layer.mlp_update_norm)
        self._idle = Program(np.zeros(1, np.int64), shared)
        return update, operations

    def _bind_end(self, rows: np.ndarray, update: Update) -> list[Operation]:
        """To the next stage. The norm is run for what it adds; what it makes is not read."""
        if self._stage.is_last:
            return []
        add = self._norm(rows, update, self._layers[-1].mlp_norm, self._x_TH)
        return [add, self._stage.send(rows, self._hidden_TH)]

    def _bind_logits(self, head: Linear, update: Update) -> Program:
        """From the last layer to logits, for the rows that are sampled."""
        sampled, sequences = np.zeros(1, np.int64), len(self._batch.rows)
        width = self._layout.padded(self._config.hidden_size)
        last_SH = torch.zeros(sequences, width, dtype=self.geometry.dtype)
        logits_SV = torch.empty(sequences, head.width)
        norm = self._norm(sampled, update, self._final_norm, last_SH, self._batch.last)
        gathered = self._group.gather(sampled, logits_SV, head.outputs)
        self._gathered_SV = gathered.rows
        operations = [norm, *head.bind(sampled, last_SH, logits_SV), *gathered.operations]
        return Program(sampled, operations)

    def _bind_attention(
        self, index: int, group: int, place: int, layer: _Layer, rows: np.ndarray, update: Update
    ) -> list[Operation]:
        c, wide, update_TH = self._config, self._wide_TN, self._update_TH
        rotation = self._rotations[c.rope_of[index]]
        return [
            self._norm(rows, update, layer.input_norm, self._x_TH),
            *layer.qkv.bind(rows, self._x_TH, wide),
            *self._attention.bind(
                group,
                place,
                rows,
                wide,
                layer.qkv.width,
                rotation.cos,
                rotation.sin,
                layer.qk_norms,
                c.eps,
                c.windows[index],
                self._x_TQ,
            ),
            *layer.output.bind(rows, self._x_TQ, update_TH),
            *self._group.sum(rows, update_TH),
            self._norm(
                rows, Update(update_TH, layer.attention_update_norm), layer.mlp_norm, self._x_TH
            ),
        ]

    def _bind_mlp(self, layer: _Layer, rows: np.ndarray) -> tuple[list[Operation], torch.Tensor]:
        """The operations, and what they make of x [T, padded hidden]."""
        c, wide, update_TH, x_TH = self._config, self._wide_TN, self._update_TH, self._x_TH
        activation = ACTIVATIONS[c.activation]
        summed = self._group.sum(rows, update_TH)
        if layer.mixture is not None:
            mixture, experts = layer.mixture, self.experts
            if self._replicas is not None:
                own_TH = self._replicas.own_rows(experts.all_y_PNH)
                return mixture.bind_for_all(x_TH, experts, activation), own_TH
            return [*mixture.bind(rows, x_TH, experts, activation, update_TH), *summed], update_TH
        dense = [
            *layer.gate_up.bind(rows, x_TH, wide),
            activation.bind(
                self.geometry.dtype,
                rows=rows,
                gate_up=wide,
                out=self._x_TI,
                size=c.intermediate_size,
                stride=layer.gate_up.width,
                out_bytes=self._x_TI.stride(0) * self._x_TI.itemsize,
            ),
            *layer.down.bind(rows, self._x_TI, update_TH),
            *summed,
        ]
        return dense, update_TH

    def _norm(
        self,
        rows: np.ndarray,
        update: Update,
        weight: torch.Tensor,
        out: torch.Tensor,
        index: np.ndarray | None = None,
    ) -> Operation:
        return add_rms_norm_kernel.bind(
            self.geometry.dtype,
            rows=rows,
            index=index,
            hidden=self._hidden_TH,
            update=update.value_TH,
            update_weight=update.norm_H,
            weight=weight,
            out=out,
            size=self._config.hidden_size,
            update_stride=0 if update.value_TH is None else update.value_TH.stride(0),
            out_bytes=out.stride(0) * out.itemsize,
            eps=self._config.eps,
        )

    def forward(self, step: Step) -> torch.Tensor | None:
        """float32 logits [len(step.sampled), vocabulary] of the step that the batch has prepared;
        None on other ranks than the output rank.

        Valid until the next call.
        """
        self._stage.wait()
        self._rotate(step.num_tokens)
        self._attention.prepare(step)
        self._body.run(step.num_tokens)
        return self.logits(len(step.sampled))

    def logits(self, num_tokens: int) -> torch.Tensor | None:
        """The same for the tokens of this step that batch.last names, each at most once a step."""
        if num_tokens and self._tail is not None:
            self._tail.run(num_tokens)
        self._check()
        logits_SV = self._gathered_SV
        return None if logits_SV is None else logits_SV[:num_tokens, : self._vocab_size]

    def idle(self) -> None:
        """A step without tokens, for the other replicas that step together with this one."""
        self._idle.run(0)
        self._check()

    def _check(self) -> None:
        self._group.check()
        if self._replicas is not None:
            self._replicas.check()

    def _rotate(self, tokens: int) -> None:
        positions = torch.from_numpy(self._batch.positions[:tokens]).float()
        for rotation in self._rotations:
            rotation.turn(positions)
