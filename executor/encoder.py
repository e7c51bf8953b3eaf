"""The forward pass of a BERT encoder, as its declaration says (executor/models/bert.py).

The tokens of all sequences lie one behind another, without padding; everything but attention sees
them so. For attention, sequences of about the same length are padded to the longest of them: a
group takes in the next shorter one as long as that is at least SHORTEST of its longest, so what is
computed in vain is bounded, and there are few groups.

Legend: T tokens of the step, S sequences, H hidden size, N heads, D head size, G sequences of a
group, L length of its longest.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from .models.bert import BertConfig
from .weights import WeightSource

SHORTEST = 0.75

Affine = tuple[torch.Tensor, torch.Tensor]  # weight, bias


class Group(NamedTuple):
    """size: G. index: the place in the step of each of the G x L tokens, 0 in padding. real: which
    of them are not padding, and places: where these are in the step. mask: bool [G, 1, 1, L], what
    attention may look at; None where there is no padding.
    """

    size: int
    index: torch.Tensor
    real: torch.Tensor
    places: torch.Tensor
    mask: torch.Tensor | None


def make_groups(lengths: NDArray[np.int64], device: torch.device) -> list[Group]:
    """The groups of sequences that lie one behind another with these lengths."""
    starts = np.cumsum(lengths) - lengths
    by_length = np.argsort(-lengths, kind="stable")
    groups = []
    while by_length.size:
        longest = int(lengths[by_length[0]])
        count = int(np.count_nonzero(lengths[by_length] >= SHORTEST * longest))
        members, by_length = by_length[:count], by_length[count:]
        places = np.arange(longest)[None, :]
        mask = places < lengths[members][:, None]
        index = np.where(mask, starts[members][:, None] + places, 0)
        real = np.flatnonzero(mask)
        arrays = (index.reshape(-1), real, index[mask], mask[:, None, None, :])
        flat, real_G, places_G, seen = (torch.from_numpy(array).to(device) for array in arrays)
        groups.append(Group(count, flat, real_G, places_G, None if mask.all() else seen))
    return groups


class _Weights:
    """Takes weights by name in the model's type, on its device."""

    def __init__(self, source: WeightSource, dtype: torch.dtype, device: torch.device) -> None:
        self._source, self._dtype, self._device = source, dtype, device
        self.num_bytes = 0

    def take(self, name: str, *shape: int) -> torch.Tensor:
        taken = self._source.take(name, shape).to(self._device, self._dtype, copy=True)
        self.num_bytes += taken.nbytes
        return taken

    def affine(self, name: str, *shape: int) -> Affine:
        return self.take(f"{name}.weight", *shape), self.take(f"{name}.bias", shape[0])

    def stacked(self, names: list[str], *shape: int) -> Affine:
        """Layers that share an input, as one."""
        parts = [self.affine(name, *shape) for name in names]
        return torch.cat([w for w, _ in parts]), torch.cat([b for _, b in parts])


class _Layer:
    def __init__(self, c: BertConfig, weights: _Weights, prefix: str) -> None:
        hidden, inner = c.hidden_size, c.intermediate_size
        attention = prefix + "attention."
        names = [f"{attention}self.{name}" for name in ("query", "key", "value")]
        self.qkv = weights.stacked(names, hidden, hidden)
        self.output = weights.affine(attention + "output.dense", hidden, hidden)
        self.attention_norm = weights.affine(attention + "output.LayerNorm", hidden)
        self.up = weights.affine(prefix + "intermediate.dense", inner, hidden)
        self.down = weights.affine(prefix + "output.dense", hidden, inner)
        self.mlp_norm = weights.affine(prefix + "output.LayerNorm", hidden)


class BertEncoder:
    """Raises ModelLoadError for weights that are not those of `config`."""

    def __init__(
        self,
        config: BertConfig,
        source: WeightSource,
        dtype: torch.dtype,
        device: torch.device,
        progress: Callable[[int, int], None],
    ) -> None:
        c = self._config = config
        self.device = device
        weights = _Weights(source, dtype, device)
        prefix, hidden = "embeddings.", c.hidden_size
        self._words = weights.take(prefix + "word_embeddings.weight", c.vocab_size, hidden)
        positions = weights.take(prefix + "position_embeddings.weight", c.num_positions, hidden)
        types = weights.take(prefix + "token_type_embeddings.weight", c.num_types, hidden)
        self._positions = positions + types[0]  # a prompt is one text: its tokens are of type 0
        self._norm_weights = weights.affine(prefix + "LayerNorm", hidden)
        self._layers = []
        for i in range(c.num_layers):
            progress(i, c.num_layers)
            self._layers.append(_Layer(c, weights, f"encoder.layer.{i}."))
        source.finish(c.ignored)
        progress(c.num_layers, c.num_layers)
        self.num_bytes = weights.num_bytes

    def forward(self, token_ids: NDArray[np.int32], lengths: NDArray[np.int64]) -> torch.Tensor:
        """[T, H] for the tokens of sequences with these lengths, one behind another."""
        positions = np.arange(len(token_ids)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        ids_T = torch.from_numpy(token_ids.astype(np.int64)).to(self.device)
        positions_T = torch.from_numpy(positions).to(self.device)
        groups = make_groups(lengths, self.device)
        x_TH = self._words[ids_T] + self._positions[positions_T]
        x_TH = self._norm(x_TH, self._norm_weights)
        for layer in self._layers:
            attended = F.linear(self._attend(layer, x_TH, groups), *layer.output)
            x_TH = self._norm(x_TH + attended, layer.attention_norm)
            inner = F.gelu(F.linear(x_TH, *layer.up), approximate=self._config.gelu)
            x_TH = self._norm(x_TH + F.linear(inner, *layer.down), layer.mlp_norm)
        return x_TH

    def _attend(self, layer: _Layer, x_TH: torch.Tensor, groups: list[Group]) -> torch.Tensor:
        c = self._config
        qkv = F.linear(x_TH, *layer.qkv)
        out_TH = torch.empty_like(x_TH)
        for group in groups:
            padded = qkv.index_select(0, group.index)
            qkv_GL3ND = padded.view(group.size, -1, 3, c.heads, c.head_size)
            q, k, v = qkv_GL3ND.permute(2, 0, 3, 1, 4).unbind(0)  # [G, N, L, D]
            attended = F.scaled_dot_product_attention(q, k, v, attn_mask=group.mask)
            rows = attended.transpose(1, 2).reshape(-1, c.hidden_size)
            if group.mask is not None:
                rows = rows.index_select(0, group.real)
            out_TH.index_copy_(0, group.places, rows)
        return out_TH

    def _norm(self, x_TH: torch.Tensor, weights: Affine) -> torch.Tensor:
        return F.layer_norm(x_TH, x_TH.shape[1:], *weights, eps=self._config.eps)
