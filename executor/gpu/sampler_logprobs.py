"""Log-probabilities on their way from the device to messages."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from ...kernels.gpu.logprobs import token_logprobs
from ...mq import codec
from ...mq.messages import TokenLogprobs
from .sampler_options import to_device

Ints = NDArray[np.int32]


class PendingLogprobs:
    """What TokenLogprobs says of M tokens, being computed and copied to the host."""

    def __init__(
        self,
        logits_NV: torch.Tensor,
        places_M: torch.Tensor,
        chosen_M: torch.Tensor,
        index: Ints,
        num_logprobs: Ints,
        vocab_size: int,
    ) -> None:
        """index [M] goes into the message. num_logprobs [M]: how many of the likeliest each wants
        beside its own.
        """
        self._index, self._asked = index, num_logprobs
        self._most = int(num_logprobs.max())
        found = token_logprobs(logits_NV, places_M, chosen_M, self._most, vocab_size=vocab_size)
        storage = found.ids.untyped_storage()
        whole = torch.empty(0, dtype=torch.int32, device=logits_NV.device).set_(storage)
        self._copied: torch.cuda.Event | None = None
        if whole.is_cuda:
            self._host = torch.empty(whole.shape, dtype=torch.int32, pin_memory=True)
            self._host.copy_(whole, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()
        else:
            self._host = whole

    def read(self) -> TokenLogprobs:
        """Waits for the copy, if the step's event has not passed yet."""
        if self._copied is not None:
            self._copied.synchronize()
        num_rows, width = len(self._asked), self._most + 1
        size = num_rows * width
        values = self._host.numpy()
        asked = np.arange(width) <= self._asked[:, None]
        ids = values[:size].reshape(num_rows, width)
        logprobs = values[size : 2 * size].view(np.float32).reshape(num_rows, width)
        return TokenLogprobs(
            width=width,
            index=codec.pack(self._index),
            token_ids=np.where(asked, ids, np.int32(-1)).tobytes(),
            logprobs=np.where(asked, logprobs, np.float32(-np.inf)).tobytes(),
            rank=values[2 * size :].tobytes(),
        )


def token_logprobs_of(
    logits_NV: torch.Tensor, token_ids_N: torch.Tensor, num_logprobs: int, vocab_size: int
) -> PendingLogprobs:
    """Of each row of the logits, the log-probabilities of `token_ids_N` (int32, on the device) and
    of the likeliest beside it; the message's index counts the rows. N is 1 or more.
    """
    num_rows = len(token_ids_N)
    every = np.arange(num_rows, dtype=np.int32)
    asked = np.full(num_rows, num_logprobs, np.int32)
    places = to_device(every, logits_NV.device)
    return PendingLogprobs(logits_NV, places, token_ids_N, every, asked, vocab_size)
