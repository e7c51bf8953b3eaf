"""What the last stage of a pipeline-parallel engine has sampled, on its way to the batches of the
stages before it: pipeline.py has the rules.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch

from ..mq import codec

_ONE = np.ones(1, np.int64)


class KnownTokens(Protocol):
    """A batch. num_known: of each row."""

    num_known: np.ndarray

    def append(self, rows: np.ndarray, tokens: np.ndarray) -> None:
        """A token to each of these rows."""


class TokenLink(Protocol):
    """One process's end of what tokens go through; items come in their order.

    is_ready: whether there is an item that this reader has not taken; for the writer, room for one.
    """

    @property
    def is_ready(self) -> bool: ...

    def wait(self) -> None:
        """Until it is ready. Raises PeerDeadError when a rank has left, and TimeoutError."""

    def bind(self, rows: np.ndarray, x: torch.Tensor) -> Callable[[], None]:
        """What sends the first rows[0] rows of x, of four bytes each, or receives into them."""


class Tokens:
    """What has been sampled, on its way to `batch`: told by the output rank, heard by the stages
    before the last one. With one stage there is no link, and nothing to do.
    """

    def __init__(self, batch: KnownTokens, link: TokenLink | None, is_last: bool) -> None:
        self._batch, self._is_last = batch, is_last
        self._sampled: deque[np.ndarray] = deque()  # rows of each step, or -1; not heard yet
        self._awaited = np.zeros(len(batch.num_known), bool)  # rows that are among them
        self._tokens = np.zeros(len(batch.num_known), np.int32)
        self._link = link
        self._launch: Callable[[], None] | None = None
        if link is not None:
            words = torch.from_numpy(self._tokens.view(np.float32))[None]
            self._launch = link.bind(_ONE, words)

    def before(self, removed: bytes, rows: bytes) -> None:
        """Before a plan is applied: append all that is there, and all that its rows need. What was
        sampled for the removed is dropped.
        """
        if self._is_last or self._link is None:
            return
        gone = codec.ints(removed)
        if len(gone):
            self._awaited[gone] = False
            for sampled in self._sampled:
                sampled[np.isin(sampled, gone)] = -1
        needed = codec.ints(rows)
        while self._sampled and (self._link.is_ready or self._awaited[needed].any()):
            self._link.wait()
            self._run()
            sampled = self._sampled.popleft()
            places = np.flatnonzero(sampled >= 0)
            self._batch.append(sampled[places], self._tokens[places])
            self._awaited[sampled[places]] = False

    def after(self, sampled: np.ndarray, tokens: np.ndarray) -> None:
        """After a step: tell what was sampled, or note what is to be heard."""
        if self._is_last:
            self._batch.append(sampled, tokens)
            if self._link is not None and len(sampled):
                self._tokens[: len(tokens)] = tokens
                self._link.wait()
                self._run()
        elif len(sampled):
            self._sampled.append(sampled.copy())
            self._awaited[sampled] = True

    def _run(self) -> None:
        assert self._launch is not None
        self._launch()
