"""Log-probabilities as messages carry them: of given tokens and of the likeliest beside them."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from ..mq import codec
from ..mq.messages import TokenLogprobs
from ..mq.sampling_params import MAX_LOGPROBS

Ints = NDArray[np.int32]


def token_logprobs(
    raw: torch.Tensor, index: NDArray[np.int64], chosen: Ints, num_logprobs: Ints
) -> TokenLogprobs:
    """Of `raw`, log-probabilities float32 [M, V], what TokenLogprobs says of M tokens.

    index [M] goes into the message. chosen [M]: the tokens. num_logprobs [M]: how many of the
    likeliest each wants beside its own.
    """
    most = int(num_logprobs.max())
    ids = np.full((len(index), most + 1), -1, np.int32)
    logprobs = np.full((len(index), most + 1), -np.inf, np.float32)
    of_chosen = raw.gather(1, torch.from_numpy(chosen.astype(np.int64))[:, None])
    ids[:, 0] = chosen
    logprobs[:, :1] = of_chosen.numpy()
    if most:
        # Always as many: which of equal ones come must not depend on what the neighbours want.
        top = raw.topk(min(MAX_LOGPROBS, raw.shape[1]), -1)
        some = min(most, raw.shape[1])
        asked = np.arange(some) < num_logprobs[:, None]
        ids[:, 1 : 1 + some] = np.where(asked, top.indices.numpy()[:, :some], -1)
        logprobs[:, 1 : 1 + some] = np.where(asked, top.values.numpy()[:, :some], -np.inf)
    rank = 1 + torch.count_nonzero(raw > of_chosen, -1)
    return TokenLogprobs(
        width=most + 1,
        index=codec.pack(index),
        token_ids=ids.tobytes(),
        logprobs=logprobs.tobytes(),
        rank=codec.pack(rank.numpy()),
    )
