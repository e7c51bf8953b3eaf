"""Log-probabilities as messages carry them."""

from __future__ import annotations

import numpy as np
import torch

from ringcast.executor.logprobs import token_logprobs
from ringcast.mq import codec


def rows_of(raw: torch.Tensor, asked: list[int]) -> list[tuple[list[int], list[float]]]:
    """What each row got beside its own token 7."""
    chosen = np.full(len(raw), 7, np.int32)
    made = token_logprobs(raw, np.arange(len(raw)), chosen, np.array(asked, np.int32))
    ids = codec.ints(made.token_ids).reshape(len(raw), made.width)[:, 1:]
    values = codec.floats(made.logprobs).reshape(len(raw), made.width)[:, 1:]
    return [(ids[i, :n].tolist(), values[i, :n].tolist()) for i, n in enumerate(asked)]


def test_each_row_gets_as_many_as_it_wants() -> None:
    raw = torch.randn(3, 50, generator=torch.Generator().manual_seed(0)).log_softmax(-1)
    for row, (ids, values) in zip(raw, rows_of(raw, [4, 0, 20]), strict=True):
        best = row.topk(len(ids))
        assert ids == best.indices.tolist()
        assert values == best.values.tolist()


def test_a_small_vocabulary_has_no_more() -> None:
    raw = torch.randn(1, 8, generator=torch.Generator().manual_seed(0)).log_softmax(-1)
    ids, values = rows_of(raw, [20])[0]
    assert sorted(ids[:8]) == [*range(8)]
    assert ids[8:] == [-1] * 12
    assert values[8:] == [-np.inf] * 12


def test_equals_are_chosen_alike_whatever_the_neighbours_want() -> None:
    raw = torch.zeros(2, 3000)
    raw[:, 2000:] = -1.0
    for wanted in (1, 2, 5, 19):
        alone = rows_of(raw[:1], [wanted])[0]
        assert all(rows_of(raw, [wanted, other])[0] == alone for other in (0, 1, 7, 20))
