"""The forward pass of the Llama family on a CUDA device, as its declaration says
(executor/models/), with the residual stream in the model's type.

Dense products are those of linears.py, all else is kernels/gpu/. Queries, keys and values are one
product, and so are gate and up. Every buffer is made once, so that a step can be captured in a
graph. A step of one token has a way of its own, which is five launches a layer, where all linear
layers have it (kernels/gpu/few_linear.py). In decode steps of more, products of 16 bits that
are faster than cuBLAS's bring their activation or the residual add with them
(kernels/gpu/batch_linear.py).

A rank of several runs its part of the model (sharding.py). What it has for the residual stream is
part of a sum, which is made where the residual is added or just before (parallel.py). Of replicas
that share a mixture's experts, each computes those that it has for the rows of all (replicas.py). A
stage of several runs its layers (../stages.py): it takes the residual stream from the stage before,
and hands it on with everything added (stages.py); after the last one it goes to the head (head.py).

Where a launch may be programmatic (pdl), each kernel of the chain waits for the one before it, so
that none reads what a kernel further back has yet to write.

Legend: T tokens, S sequences, N sampled ones, H hidden size, Q = query heads x head size, W = the
wider of qkv and gate_up, I inner size, V vocabulary, D head size.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ...kernels.gpu.activation import gated_activation
from ...kernels.gpu.embedding import embed
from ...kernels.gpu.few_linear import few_linear
from ...kernels.gpu.norm import AddNorm, add_rms_norm, rms_norm
from ...kernels.gpu.stage_pipe import Item
from ..models.llama import LlamaConfig
from ..sharding import Sharding
from ..stages import WHOLE, Position, deal_stage, may_be_left
from ..weights import WeightSource
from .attention import Attention
from .batch import GpuBatch
from .batch_linears import BatchLinears
from .experts import ExpertRunner, ExpertWeights, Mixtures
from .head import Head
from .linears import AnyLinear, Linear, OneTokenLinear
from .parallel import ATTENTION, EMBEDDING, FEED_FORWARD, Alone, DeviceGroup
from .replicas import RowGroup
from .schemes import Scheme
from .stages import GpuStage
from .weight_reader import Layer, WeightReader
from .work import Work


class GpuDecoder:
    """Weights first (the constructor), then buffers for a batch (`bind`) and a cache (`set_cache`),
    then `forward` and `logits` for every step.

    scheme: of the linear layers (schemes.py). cache_dtype: of the KV cache, the model's by default.
    rank, size: config and source are of the whole model, and a rank of several has its part of it.
    config: what this rank has of the model. position: of its stage. Raises ConfigError where the
    model can't be split so.
    """

    def __init__(
        self,
        config: LlamaConfig,
        dtype: torch.dtype,
        block_size: int,
        source: WeightSource,
        device: torch.device,
        progress: Callable[[int, int], None],
        scheme: Scheme | None = None,
        cache_dtype: torch.dtype | None = None,
        rank: int = 0,
        size: int = 1,
        by_expert: bool = False,
        dealt: tuple[int, int] | None = None,
        position: Position = WHOLE,
        redundant: int = 0,
    ) -> None:
        """by_expert, dealt, redundant: as Sharding has them."""
        sharding = Sharding(config, rank, size, by_expert, dealt, redundant)
        c, source = sharding.local, sharding.weights(source)
        self.config = self._config = c
        self._first_token = sharding.parts["vocab_size"].start
        self._group: DeviceGroup | Alone = Alone()
        self.cache_dtype = cache_dtype or dtype
        self._dtype, self._device, self._block_size = dtype, device, block_size
        self._stage = GpuStage(position)
        numbers = position.layers(c.num_layers)
        self.groups = deal_stage(c.windows, numbers)
        places = {
            layer: (g, place)
            for g, group in enumerate(self.groups)
            for place, layer in enumerate(group.layers)
        }
        scales_cache = self.cache_dtype.itemsize == 1
        read = WeightReader(c, source, dtype, device, scheme, scales_cache)
        self._take_ends(read)
        self._layers: list[Layer] = []
        for done, i in enumerate(numbers):
            progress(done, len(numbers))
            self._layers.append(read.layer(i, *places[i]))
        source.finish(lambda name: may_be_left(name, numbers, c.num_layers, c.tied))
        progress(len(numbers), len(numbers))
        sparse = {
            i: layer.mlp
            for i, layer in zip(numbers, self._layers, strict=True)
            if isinstance(layer.mlp, ExpertWeights)
        }
        self.mixtures = Mixtures(sparse, sharding, device) if sparse else None
        self.num_bytes, self._workspace = read.num_bytes, read.workspace
        self._takes_one_token = all(
            isinstance(linear, OneTokenLinear) for layer in self._layers for linear in layer.linears
        )
        # The embedding is scaled by what the model's own type makes of the scale.
        self._scale = float(torch.tensor(c.embedding_scale, dtype=dtype))

    def _take_ends(self, read: WeightReader) -> None:
        c, stage, hidden = self._config, self._stage, self._config.hidden_size
        if stage.is_first or (c.tied and stage.is_last):
            self._table = read.stack({"model.embed_tokens.weight": c.vocab_size}, hidden)
        self._head: Head | None = None  # of the last stage
        if stage.is_last:
            own = None if c.tied else read.stack({"lm_head.weight": c.vocab_size}, hidden)
            weight = Linear(self._table if own is None else own, None)
            self._head = Head(c, weight, read.norm("model.norm", hidden))

    @property
    def block_bytes(self) -> int:
        """Of one block in all layers of a group, keys and values."""
        c, layers = self._config, max(len(group.layers) for group in self.groups)
        return 2 * layers * c.kv_heads * c.head_size * self._block_size * self.cache_dtype.itemsize

    @property
    def head_group(self) -> int:
        """Query heads per key head."""
        return self._config.heads // self._config.kv_heads

    def at_rest(self) -> contextlib.AbstractContextManager[None]:
        """Within, a forward pass runs nothing that other ranks would have to run, too, but kernels
        of Triton's.
        """
        return (self._replicas or self._group).at_rest()

    def representatives(self) -> list[int]:
        """A layer of each kind: all others launch the same kernels on other tensors. Twice where
        the layer behind adds up what replicas have computed; the last one is the model's last.
        """
        kinds = {
            (layer.window, layer.rope, type(layer.mlp), *map(type, layer.linears)): i
            for i, layer in enumerate(self._layers)
        }
        chosen = sorted(kinds.values())
        return chosen if self._replicas is None else chosen * 2

    def bind(
        self,
        batch: GpuBatch,
        max_model_len: int,
        group: DeviceGroup | Alone | None = None,
        replicas: RowGroup | None = None,
        stage: GpuStage | None = None,
    ) -> None:
        """Make the buffers for `batch`. group, stage: where there are several. replicas: those that
        share the experts.
        """
        c, tokens = self._config, batch.max_tokens
        q, kv = c.heads * c.head_size, c.kv_heads * c.head_size
        self._qkv_size = q + 2 * kv

        def buffer(rows: int, size: int) -> torch.Tensor:
            return torch.zeros(rows, size, dtype=self._dtype, device=self._device)

        self._batch, self._group, self._replicas = batch, group or Alone(), replicas
        self._summing: Any = self._group  # who adds up what the last product has made
        self._stage = stage or self._stage
        self._residual_TH, self._x_TH, self._update_TH = (
            buffer(tokens, c.hidden_size) for _ in range(3)
        )
        self._wide_TW = buffer(tokens, max(self._qkv_size, 2 * c.dense_size)).view(-1)
        self._attended_TQ = buffer(tokens, q)
        self._inner_TI = buffer(tokens, c.dense_size)
        self._workspace.make(tokens, self._dtype, self._device)
        most_outputs = max(self._qkv_size, 2 * c.dense_size, c.vocab_size)
        self._batch_linears = BatchLinears(most_outputs, self._device)
        self.logits_NV = buffer(batch.capacity, 0)
        if self._head is not None:
            single = self._takes_one_token and not c.sandwich
            self._head.bind(batch.capacity, self._group, self._batch_linears, single)
            self.logits_NV = self._head.logits_NV
        if self.mixtures is not None:
            counts_N = batch.num_tokens(1) if replicas is None else replicas.num_tokens_N
            parts = self.mixtures, batch.turn_1, counts_N
            self._experts = ExpertRunner(c, tokens, self._dtype, self._device, *parts)
        self._attention = Attention(c, batch, max_model_len, self._dtype, self._device)

    def distinct_steps(self, most: int) -> list[int]:
        """Numbers of tokens up to `most` that make a difference to a mixture of experts."""
        return [] if self.mixtures is None else self._experts.steps(most)

    def set_cache(self, num_blocks: int) -> torch.Tensor:
        """Make the cache: [layers of a group, 2, blocks, kv heads, block size, D]."""
        c, layers = self._config, max(len(group.layers) for group in self.groups)
        shape = (layers, 2, num_blocks, c.kv_heads, self._block_size, c.head_size)
        self.cache = torch.zeros(shape, dtype=self.cache_dtype, device=self._device)
        self._attention.cache = self.cache
        return self.cache

    def forward(self, work: Work, layers: Sequence[int] | None = None, pdl: bool = False) -> None:
        """The step that the batch has laid out, up to the last layer. layers: only these."""
        chosen = self._layers if layers is None else [self._layers[i] for i in layers]
        tokens = work.tokens
        residual_TH = self._residual_TH[:tokens]
        if self._stage.is_first:
            self._embed(self._batch.token_ids_T[:tokens], residual_TH, pdl)
        else:
            self._stage.receive(residual_TH, pdl)
        run = self._single_layer if self._is_single(work) else self._layer
        added, update_norm = True, None  # at first there is no update
        for layer in chosen:
            added = run(layer, work, added, update_norm, pdl)
            update_norm = layer.mlp_update_norm
        if self._summing.size > 1 and not added:
            self._summing.sum(self._part_TH, self._update_TH[:tokens], pdl=pdl)
        if self._replicas is not None:
            sparse = sum(isinstance(layer.mlp, ExpertWeights) for layer in chosen)
            self._replicas.check_exchanges(sparse)
        self._left = self._what_is_left(tokens, added, update_norm)
        if not self._stage.is_last:
            self._stage.send(self._left, pdl)

    def _what_is_left(self, tokens: int, added: bool, update_norm: torch.Tensor | None) -> Item:
        update_TH = None if added else self._update_TH[:tokens]
        return Item(self._residual_TH[:tokens], update_TH, update_norm, self._config.eps)

    def resume(self, tokens: int) -> None:
        """A graph has done the forward pass of a step with prompts: logits go on from there."""
        self._left = self._what_is_left(tokens, False, self._layers[-1].mlp_update_norm)

    def _embed(self, token_ids_T: torch.Tensor, out_TH: torch.Tensor, pdl: bool) -> None:
        if self._group.size == 1:
            embed(token_ids_T, self._table, out_TH, self._scale, pdl=pdl)
            return
        part_TH = self._group.place(EMBEDDING, out_TH)
        first = self._first_token
        embed(token_ids_T, self._table, part_TH, self._scale, first=first, pdl=pdl)
        self._group.sum(part_TH, out_TH, pdl=pdl)

    def _is_single(self, work: Work) -> bool:
        """Whether a step has the way of one token."""
        return work.is_single and self._takes_one_token

    def logits(self, index_N: torch.Tensor, work: Work, pdl: bool = False) -> torch.Tensor:
        """[N, V] of the tokens of the step that `index` names, in the model's type. Valid until the
        next call. On other ranks than rank 0, and before the last stage, nothing to be read.
        """
        if self._head is not None:
            self._head.run(self._left, index_N, work, pdl)
        return self.logits_NV[: len(index_N)]

    # --- a layer, for any number of tokens

    def _layer(
        self,
        layer: Layer,
        work: Work,
        added: bool,
        update_norm: torch.Tensor | None,
        pdl: bool,
    ) -> bool:
        """added: the residual stream has the update of the layer before. Returns whether it has
        this one's.
        """
        c, tokens = self._config, work.tokens
        x_TH, inner_TI = self._x_TH[:tokens], self._inner_TI[:tokens]
        qkv_TN = self._wide(tokens, self._qkv_size)
        self._norm(layer.input_norm, tokens, added, update_norm, pdl)
        if not self._few_product(work, layer.qkv, x_TH, qkv_TN, pdl):
            layer.qkv.into(x_TH, qkv_TN, pdl)
        attended_TQ = self._attended_TQ[:tokens]
        attend = self._attention.run_single if work.is_single else self._attention.run
        attend(layer, work, qkv_TN, attended_TQ, pdl)
        added = self._update(work, ATTENTION, layer.output, attended_TQ, pdl)
        if isinstance(layer.mlp, ExpertWeights):
            self._mixture(layer, tokens, added, pdl)
            return False
        self._norm(layer.mlp_norm, tokens, added, layer.attention_update_norm, pdl)
        if not self._few_product(work, layer.gate_up, x_TH, inner_TI, pdl, c.activation):
            gate_up_TN = self._wide(tokens, 2 * c.intermediate_size)
            layer.gate_up.into(x_TH, gate_up_TN, pdl)
            gated_activation(gate_up_TN, inner_TI, c.activation, pdl=pdl)
        return self._update(work, FEED_FORWARD, layer.down, inner_TI, pdl)

    def _mixture(self, layer: Layer, tokens: int, added: bool, pdl: bool) -> None:
        """The norm before a mixture of experts, and what the next one has to add."""
        replicas, mlp, x_TH = self._replicas, layer.mlp, self._x_TH[:tokens]
        assert isinstance(mlp, ExpertWeights)
        if replicas is not None:
            x_TH = replicas.place_rows(x_TH)
        self._norm(layer.mlp_norm, tokens, added, layer.attention_update_norm, pdl, x_TH)
        if replicas is None:
            self._experts.run(mlp, x_TH, self._place(FEED_FORWARD, tokens), pdl=pdl)
            return
        all_TH, part_TH = replicas.gather_rows(x_TH, pdl), replicas.place_all(tokens)
        self._experts.run(mlp, all_TH, part_TH, pdl=pdl)
        self._summing, self._part_TH = replicas, replicas.own_rows(part_TH)

    def _place(self, which: int, tokens: int) -> torch.Tensor:
        """Where a product goes that the next norm, or `_summing`, adds to the residual stream."""
        self._summing, update_TH = self._group, self._update_TH[:tokens]
        if self._group.size > 1:
            update_TH = self._part_TH = self._group.place(which, update_TH)
        return update_TH

    def _update(
        self, work: Work, which: int, linear: AnyLinear, x_TK: torch.Tensor, pdl: bool
    ) -> bool:
        """A product to be added to the residual stream; False if the next norm has to add it."""
        residual_TH, part_TH = self._residual_TH[: work.tokens], self._place(which, work.tokens)
        if self._group.size > 1:
            if not self._few_product(work, linear, x_TK, part_TH, pdl):
                linear.into(x_TK, part_TH, pdl)
            return False
        if not self._config.sandwich and self._few_product(
            work, linear, x_TK, residual_TH, pdl, add_to=residual_TH
        ):
            return True
        linear.into(x_TK, part_TH, pdl)
        return False

    def _few_product(
        self,
        work: Work,
        linear: AnyLinear,
        x_TK: torch.Tensor,
        out_TN: torch.Tensor,
        pdl: bool,
        activation: str | None = None,
        add_to: torch.Tensor | None = None,
    ) -> bool:
        """False where cuBLAS is to do it."""
        few = self._batch_linears
        return work.is_few and few.into(linear, x_TK, out_TN, pdl, activation, add_to)

    def _wide(self, tokens: int, size: int) -> torch.Tensor:
        return self._wide_TW[: tokens * size].view(tokens, size)

    def _norm(
        self,
        weight_H: torch.Tensor,
        tokens: int,
        added: bool,
        update_norm: torch.Tensor | None,
        pdl: bool,
        out_TH: torch.Tensor | None = None,
    ) -> None:
        """To out (x), after the update is added to the residual stream, unless it is."""
        residual_TH, eps = self._residual_TH[:tokens], self._config.eps
        x_TH = self._x_TH[:tokens] if out_TH is None else out_TH
        if added:
            rms_norm(residual_TH, weight_H, x_TH, eps, pdl=pdl)
            return
        norm = AddNorm(residual_TH, weight_H, x_TH, eps, update_norm)
        if self._summing.size > 1:
            self._summing.sum_add_rms_norm(self._part_TH, norm, pdl)
            return
        add_rms_norm(self._update_TH[:tokens], *norm, pdl=pdl)

    # --- a layer, for one token

    def _single_layer(
        self,
        layer: Layer,
        work: Work,
        added: bool,
        update_norm: torch.Tensor | None,
        pdl: bool,
    ) -> bool:
        c = self._config
        residual, attended, inner = self._residual_TH[:1], self._attended_TQ[:1], self._inner_TI[:1]
        qkv = self._wide(1, self._qkv_size)
        if not c.sandwich:
            self._few(residual, layer.qkv, qkv, pdl, norm=layer.input_norm)
            self._attention.run_single(layer, work, qkv, attended, pdl)
            self._few_update(ATTENTION, attended, layer.output, residual, pdl)
            if isinstance(layer.mlp, ExpertWeights):
                self._single_mixture(layer, residual, pdl)
                return True
            self._few(residual, layer.gate_up, inner, pdl, layer.mlp_norm, c.activation)
            self._few_update(FEED_FORWARD, inner, layer.down, residual, pdl)
            return True
        x = self._x_TH[:1]
        self._norm(layer.input_norm, 1, added, update_norm, pdl)
        self._few(x, layer.qkv, qkv, pdl)
        self._attention.run_single(layer, work, qkv, attended, pdl)
        self._few(attended, layer.output, self._place(ATTENTION, 1), pdl)
        self._norm(layer.mlp_norm, 1, False, layer.attention_update_norm, pdl)
        self._few(x, layer.gate_up, inner, pdl, activation=c.activation)
        self._few(inner, layer.down, self._place(FEED_FORWARD, 1), pdl)
        return False

    def _single_mixture(self, layer: Layer, residual: torch.Tensor, pdl: bool) -> None:
        if self._group.size > 1 or self._replicas is not None:
            self._mixture(layer, 1, True, pdl)
            self._summing.sum(self._part_TH, residual, residual, pdl)
            return
        self._norm(layer.mlp_norm, 1, True, None, pdl)
        assert isinstance(layer.mlp, ExpertWeights)
        self._experts.run(layer.mlp, self._x_TH[:1], residual, add_to_TH=residual, pdl=pdl)

    def _few_update(
        self, which: int, x: torch.Tensor, linear: AnyLinear, residual: torch.Tensor, pdl: bool
    ) -> None:
        """A product that is added to the residual stream."""
        if self._group.size == 1:
            self._few(x, linear, residual, pdl, add_to=residual)
            return
        part = self._place(which, 1)
        self._few(x, linear, part, pdl)
        self._group.sum(part, residual, residual, pdl)

    def _few(
        self,
        x: torch.Tensor,
        linear: AnyLinear,
        out: torch.Tensor,
        pdl: bool,
        norm: torch.Tensor | None = None,
        activation: str | None = None,
        add_to: torch.Tensor | None = None,
    ) -> None:
        assert isinstance(linear, OneTokenLinear)
        few_linear(
            x,
            linear.weight_NK,
            out,
            scale_N=linear.scale_N,
            bias_N=linear.bias_N,
            norm_weight_K=norm,
            eps=self._config.eps,
            activation=activation,
            add_to_1N=add_to,
            pdl=pdl,
        )
