"""The end of a forward pass on a CUDA device: from what the last layer has left of the residual
stream to the logits of some of its tokens.

Ranks have a part of the vocabulary each, and the logits come together on rank 0 (parallel.py).

Legend: T tokens, N sampled ones, H hidden size, V vocabulary.
"""

from __future__ import annotations

import torch

from ...kernels.gpu.few_linear import few_linear
from ...kernels.gpu.norm import add_rms_norm, rms_norm
from ...kernels.gpu.stage_pipe import Item
from ..models.llama import LlamaConfig
from .batch_linears import BatchLinears
from .linears import Linear
from .parallel import Alone, DeviceGroup
from .work import Work


class Head:
    """linear: of this rank's part of the vocabulary. Weights first, then buffers (`bind`).

    logits_NV: of the whole vocabulary; on other ranks than rank 0, their own part, which nobody
    reads there.
    """

    logits_NV: torch.Tensor

    def __init__(self, config: LlamaConfig, linear: Linear, norm_H: torch.Tensor) -> None:
        self._config, self._linear, self._norm_H = config, linear, norm_H

    def bind(
        self,
        capacity: int,
        group: DeviceGroup | Alone,
        few_linears: BatchLinears,
        takes_one_token: bool,
    ) -> None:
        """capacity: most N. takes_one_token: a step of one token ends with everything added."""
        weight_VH, c = self._linear.weight_NK, self._config
        self._group, self._few_linears = group, few_linears
        self._takes_one_token = takes_one_token
        self._last_NH = weight_VH.new_zeros(capacity, c.hidden_size)
        if isinstance(group, Alone) or not group.rank:
            self.logits_NV = weight_VH.new_zeros(capacity, group.size * c.vocab_size)
        else:
            self.logits_NV = group.own_logits(capacity)

    def run(self, left: Item, index_N: torch.Tensor, work: Work, pdl: bool) -> None:
        """To the first N rows of logits_NV. left: as a next stage would get it. index: tokens of
        the step; a negative one's logits are nobody's.
        """
        count = len(index_N)
        if isinstance(self._group, Alone):
            self._product(left, index_N, work, self.logits_NV[:count], pdl)
            return
        own_NV = self._group.own_logits(count)
        self._product(left, index_N, work, own_NV, pdl)
        self._group.gather(own_NV, None if self._group.rank else self.logits_NV[:count], pdl)

    def _product(
        self, left: Item, index_N: torch.Tensor, work: Work, logits_NV: torch.Tensor, pdl: bool
    ) -> None:
        weight_VH = self._linear.weight_NK
        if work.is_single and self._takes_one_token:
            few_linear(
                left.residual_TH,
                weight_VH,
                logits_NV,
                norm_weight_K=self._norm_H,
                eps=left.eps,
                pdl=pdl,
            )
            return
        last_NH = self._last_NH[: len(index_N)]
        self._norm(left, index_N, last_NH, pdl)
        if work.is_single:
            few_linear(last_NH, weight_VH, logits_NV, pdl=pdl)
        elif not (work.is_few and self._few_linears.into(self._linear, last_NH, logits_NV, pdl)):
            self._linear.into(last_NH, logits_NV)

    def _norm(self, left: Item, index_N: torch.Tensor, out_NH: torch.Tensor, pdl: bool) -> None:
        if left.update_TH is None:  # which is a decode step's: its samples are its tokens
            rms_norm(left.residual_TH[: len(index_N)], self._norm_H, out_NH, left.eps, pdl=pdl)
            return
        add_rms_norm(
            left.update_TH,
            left.residual_TH,
            self._norm_H,
            out_NH,
            left.eps,
            left.update_weight_H,
            index_S=index_N,
            pdl=pdl,
        )
