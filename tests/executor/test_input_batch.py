"""The batch against a plain list of sequences."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringcast.executor.input_batch import InputBatch
from ringcast.mq import codec
from ringcast.mq.messages import NewSequence, StepPlan
from ringcast.mq.sampling_params import SamplingParams


def plan(new=(), removed=(), block_rows=(), block_ids=()) -> StepPlan:
    packed = (codec.pack(block_rows), codec.pack(block_ids), b"", b"", b"", b"")
    return StepPlan(0, codec.pack(removed), list(new), *packed)


def sequence(row: int, tokens: list[int], computed: int, blocks: list[int]) -> NewSequence:
    tokens_and_blocks = codec.pack(tokens), codec.pack(blocks)
    return NewSequence(
        row, "r", 0, tokens_and_blocks[0], 1, computed, tokens_and_blocks[1], SamplingParams()
    )


def prepare(batch: InputBatch, lengths: dict[int, int]):
    return batch.prepare(np.array([*lengths], np.int32), np.array([*lengths.values()], np.int32))


def test_prepare_lays_out_a_super_sequence():
    batch = InputBatch(4, 32, 40, block_size=4)
    batch.apply(plan([sequence(2, list(range(100, 109)), 5, [7, 3, 9]), sequence(0, [50], 0, [4])]))
    step = prepare(batch, {2: 3, 0: 1})
    assert (step.num_tokens, step.num_sequences) == (4, 2)
    assert batch.token_ids[:4].tolist() == [105, 106, 107, 50]
    assert batch.positions[:4].tolist() == [5, 6, 7, 0]
    assert batch.slots[0, :4].tolist() == [3 * 4 + 1, 3 * 4 + 2, 3 * 4 + 3, 4 * 4]
    assert batch.starts[:3].tolist() == [0, 3, 4]
    assert batch.context[:2].tolist() == [8, 1]
    assert batch.rows[:2].tolist() == [2, 0]
    assert step.sampled.tolist() == [0]  # row 2 has one token left to compute
    assert step.sample_positions.tolist() == [1]
    assert batch.last[:1].tolist() == [3]


def test_sampled_tokens_are_computed_next():
    batch = InputBatch(4, 32, 40, block_size=4)
    batch.apply(plan([sequence(1, [5, 6], 0, [8])]))
    step = prepare(batch, {1: 2})
    batch.append(step.sampled, np.array([77], np.int32))
    step = prepare(batch, {1: 1})
    assert batch.token_ids[0] == 77
    assert batch.slots[0, 0] == 8 * 4 + 2
    assert step.sample_positions.tolist() == [3]


def test_a_row_may_get_several_blocks_in_one_plan():
    batch = InputBatch(4, 64, 64, block_size=2)
    batch.apply(plan([sequence(1, [1] * 9, 0, [5]), sequence(3, [1] * 9, 0, [])]))
    batch.apply(plan(block_rows=[1, 3, 1, 3, 3], block_ids=[6, 20, 7, 21, 22]))
    assert batch.tables[0, 1, :3].tolist() == [5, 6, 7]
    assert batch.tables[0, 3, :3].tolist() == [20, 21, 22]
    batch.apply(plan(block_rows=[1], block_ids=[8]))
    assert batch.tables[0, 1, :4].tolist() == [5, 6, 7, 8]


def test_a_taken_row_is_not_given_out():
    batch = InputBatch(2, 8, 16, block_size=4)
    batch.apply(plan([sequence(1, [5, 6], 0, [8])]))
    with pytest.raises(AssertionError, match="row 1 is taken"):
        batch.apply(plan([sequence(1, [5, 6], 0, [8])]))
    batch.apply(plan([sequence(1, [9], 0, [2])], removed=[1]))
    assert batch.num_known[1] == 1


def test_tokens_that_are_not_known_are_not_computed():
    batch = InputBatch(2, 8, 16, block_size=4)
    batch.apply(plan([sequence(1, [5, 6], 0, [8])]))
    with pytest.raises(AssertionError, match="aren't known"):
        prepare(batch, {1: 3})


ROWS, LENGTH, BLOCK = 5, 24, 4


@settings(max_examples=60)
@given(data=st.data())
def test_any_course_of_steps(data):
    """Rows come, grow, leave and come again; each token is laid out once, in its own slots."""
    groups = data.draw(st.integers(1, 3))
    batch = InputBatch(ROWS, ROWS * LENGTH, LENGTH, BLOCK, groups)
    known: dict[int, list[int]] = {}
    computed: dict[int, int] = {}
    tables: dict[int, list[int]] = {}
    free = iter(range(1, 10_000))
    for token in range(1000, 1012):
        removed = data.draw(st.sets(st.sampled_from([*known]))) if known else set()
        for row in removed:
            del known[row], computed[row], tables[row]
        new = []
        for row in data.draw(
            st.sets(st.sampled_from([r for r in range(ROWS) if r not in known] or [-1]))
        ) - {-1}:
            known[row] = data.draw(st.lists(st.integers(0, 99), min_size=1, max_size=10))
            computed[row] = data.draw(st.integers(0, len(known[row]) - 1))
            tables[row] = [next(free) for _ in range(-(-computed[row] // BLOCK) * groups)]
            new.append(sequence(row, known[row], computed[row], tables[row]))
        lengths = {}
        for row in data.draw(st.permutations([*known])):
            lengths[row] = data.draw(st.integers(0, len(known[row]) - computed[row]))
        lengths = {row: n for row, n in lengths.items() if n}
        appended = []
        for row, n in lengths.items():
            while len(tables[row]) < -(-(computed[row] + n) // BLOCK) * groups:
                tables[row].append(next(free))
                appended.append((row, tables[row][-1]))
        batch.apply(plan(new, removed, [r for r, _ in appended], [b for _, b in appended]))
        if not lengths:
            continue
        step = prepare(batch, lengths)
        at = 0
        sampled = []
        for row, n in lengths.items():
            positions = range(computed[row], computed[row] + n)
            assert batch.positions[at : at + n].tolist() == [*positions]
            assert batch.token_ids[at : at + n].tolist() == [known[row][p] for p in positions]
            for group in range(groups):
                table = tables[row][group::groups]
                expected = [table[p // BLOCK] * BLOCK + p % BLOCK for p in positions]
                assert batch.slots[group, at : at + n].tolist() == expected
            at += n
            computed[row] += n
            if computed[row] == len(known[row]):
                sampled.append(row)
                assert batch.last[len(sampled) - 1] == at - 1
        assert step.num_tokens == at
        assert step.sampled.tolist() == sampled
        assert step.sample_positions.tolist() == [len(known[row]) for row in sampled]
        batch.append(step.sampled, np.full(len(sampled), token, np.int32))
        for row in sampled:
            known[row].append(token)
            if len(known[row]) > LENGTH - 2:
                batch.apply(plan(removed=[row]))
                del known[row], computed[row], tables[row]
