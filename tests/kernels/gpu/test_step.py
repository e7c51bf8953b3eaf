"""What a step does to the batch on the device, against the references."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from kernels.gpu.devices import DEVICE

from ringcast.kernels.gpu import step

GARBAGE = -77


def ints(values) -> torch.Tensor:
    return torch.as_tensor(np.asarray(values, np.int32), device=DEVICE)


def make_changes(runs: list[tuple[int, int, int, list[int]]]) -> torch.Tensor:
    """(table, row, column, values) each, as the host sends them."""
    at = 7 + len(runs) * step.RUN_FIELDS
    head, values = [len(runs), 7, *[GARBAGE] * 5], []
    for table, row, column, new in runs:
        head += [table, row, column, at + len(values), len(new)]
        values += new
    return ints(head + values)


@pytest.mark.parametrize("num_runs", [1, 2, 70])
def test_changes_reach_tokens_and_tables(num_runs):
    generator = np.random.default_rng(num_runs)
    tokens, tables = ints(np.full((9, 3001), GARBAGE)), ints(np.full((2, 9, 80), GARBAGE))
    runs = [(0, 3, 0, generator.integers(1, 99, 2999).tolist()), (2, 8, 0, list(range(1, 80)))]
    runs += [(1 + i % 2, i % 7, 1 + i // 14, [i]) for i in range(68)]
    changes = make_changes(runs[:num_runs])
    expected = tokens.clone(), tables.clone()
    step.apply_changes_reference(changes, *expected)
    step.apply_changes(changes, tokens, tables, num_runs=num_runs, longest=2999)
    assert torch.equal(tokens, expected[0])
    assert torch.equal(tables, expected[1])
    assert (tokens != GARBAGE).sum() == 2999


def test_a_grid_of_any_size_applies_everything():
    tokens, tables = ints(np.zeros((80, 2100))), ints(np.zeros((1, 80, 4)))
    changes = make_changes([(0, row, 5, list(range(1, 1501))) for row in range(67)])
    step.apply_changes(changes, tokens, tables, num_runs=1)
    assert torch.equal(tokens[:67, 5:1505], ints(np.tile(np.arange(1, 1501), (67, 1))))
    assert tokens.sum() == 67 * 1500 * 1501 // 2


def test_no_changes_change_nothing():
    tokens, tables = ints(np.full((2, 4), 5)), ints(np.full((1, 2, 4), 6))
    step.apply_changes(make_changes([]), tokens, tables)
    assert (tokens == 5).all()
    assert (tables == 6).all()


# lengths and contexts of the sequences, and how many tokens of padding follow
LAYOUTS = {
    "decode": ([1, 1, 1], [40, 1, 17], 0),
    "one sequence": ([1], [1500], 0),
    "chunks": ([1, 30, 1030], [9, 30, 1500], 59),
    "no sequence": ([], [], 16),
}


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("name", LAYOUTS)
def test_tokens_are_laid_out(name, groups):
    lengths, context, padding = LAYOUTS[name]
    generator = np.random.default_rng(len(lengths))
    tokens = ints(generator.integers(0, 1000, (5, 1600)))
    tables = ints(generator.integers(1, 2**26, (groups, 5, 100)))
    rows = ints([4, 0, 2][: len(lengths)])
    starts = np.concatenate([[0], np.cumsum(lengths)])
    total = int(starts[-1]) + padding

    def outputs():
        return [ints(np.full(total, GARBAGE)) for _ in range(2)] + [
            ints(np.full((groups, total + 5), GARBAGE))
        ]

    mine, expected = outputs(), outputs()
    inputs = tokens, tables, rows, ints(starts), ints(context)
    longest = max([1, *lengths, padding])
    step.lay_out_tokens_reference(*inputs, *expected[:2], expected[2][:, :total], 16)
    step.lay_out_tokens(*inputs, *mine[:2], mine[2][:, :total], 16, longest=longest)
    for a, b in zip(mine, expected, strict=True):
        assert torch.equal(a, b)


def test_padding_sequences_are_inert():
    tokens, tables = ints(np.full((2, 8), 3)), ints(np.full((1, 2, 2), 9))
    ids, positions, slots = ints([GARBAGE] * 4), ints([GARBAGE] * 4), ints([[GARBAGE] * 4])
    rows, starts, context = ints([1, -1, -1, -1]), ints([0, 1, 2, 3, 4]), ints([5, 0, 0, 0])
    step.lay_out_tokens(tokens, tables, rows, starts, context, ids, positions, slots, 16)
    assert ids.tolist() == [3, 0, 0, 0]
    assert positions.tolist() == [4, 0, 0, 0]
    assert slots.tolist() == [[9 * 16 + 4, -1, -1, -1]]


@pytest.mark.parametrize("count", [1, 5, 131])
def test_sampled_tokens_are_appended(count):
    generator = np.random.default_rng(count)
    tokens = ints(np.full((200, 50), GARBAGE))
    rows = generator.permutation(200)[:count]
    rows[1::3] = -1
    columns = rows, generator.integers(0, 50, count), generator.integers(0, 1000, count)
    expected = tokens.clone()
    arguments = [ints(column) for column in columns]
    step.append_tokens_reference(expected, *arguments)
    step.append_tokens(tokens, *arguments)
    assert torch.equal(tokens, expected)
    assert (tokens != GARBAGE).sum() == (rows >= 0).sum()


@pytest.mark.gpu
def test_rows_beyond_two_to_the_31():
    tokens = torch.zeros(2050, 1 << 20, dtype=torch.int32, device=DEVICE)
    tables = ints(np.full((1, 2050, 1 << 16), 7))
    row, place = 2049, (1 << 20) - 1
    step.append_tokens(tokens, ints([row]), ints([place]), ints([5]))
    step.apply_changes(make_changes([(0, row, place - 1, [4])]), tokens, tables)
    assert tokens[row, -2:].tolist() == [4, 5]
    ids, positions, slots = ints([0, 0]), ints([0, 0]), ints([[0, 0]])
    arguments = ints([row]), ints([0, 2]), ints([place + 1]), ids, positions, slots, 16
    step.lay_out_tokens(tokens, tables, *arguments, longest=2)
    assert ids.tolist() == [4, 5]
    assert slots.tolist() == [[7 * 16 + 14, 7 * 16 + 15]]
