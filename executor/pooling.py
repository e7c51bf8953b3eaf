"""From the last hidden states of a sequence to one vector, as sentence-transformers makes it.

Legend: T tokens of the step, S sequences, H hidden size.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from ..mq.config import PoolingSpec


def pool(hidden_TH: torch.Tensor, lengths: NDArray[np.int64], spec: PoolingSpec) -> torch.Tensor:
    """float32 [S, H]. lengths: of the sequences, which lie one behind another."""
    device = hidden_TH.device
    ends = np.cumsum(lengths)
    if spec.kind == "mean":
        owners_T = torch.from_numpy(np.repeat(np.arange(len(lengths)), lengths)).to(device)
        sums_SH = torch.zeros(len(lengths), hidden_TH.shape[1], device=device)
        sums_SH.index_add_(0, owners_T, hidden_TH.float())
        vectors_SH = sums_SH / torch.from_numpy(lengths).to(device)[:, None]
    else:
        places = ends - lengths if spec.kind == "cls" else ends - 1
        vectors_SH = hidden_TH[torch.from_numpy(places).to(device)].float()
    return F.normalize(vectors_SH, dim=1) if spec.normalize else vectors_SH
