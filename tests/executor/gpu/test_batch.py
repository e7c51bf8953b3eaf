"""The host's half of the device's batch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from kernels.gpu.devices import DEVICE

from ringcast.executor.gpu.batch import TURN, Changes, GpuBatch
from ringcast.executor.gpu.graphs import at_least, batch_sizes, context_bounds
from ringcast.kernels.gpu.decode_plan import DecodeConfig
from ringcast.kernels.gpu.expert_routing import TURNS
from ringcast.kernels.gpu.step import apply_changes_reference
from ringcast.mq import codec, messages
from ringcast.mq.sampling_params import SamplingParams


def make_batch(**changes) -> GpuBatch:
    options = {
        "max_num_seqs": 20,
        "max_tokens": 64,
        "max_model_len": 100,
        "block_size": 16,
        "num_groups": 2,
        "num_slots": 2,
        "pad": lambda count: at_least(batch_sizes(20), count),
        "windows": [0],
        "decode": DecodeConfig(4, 16, 4, 2),
        "device": DEVICE,
    }
    return GpuBatch(**(options | changes))


def plan(new=(), removed=(), appended=()) -> messages.StepPlan:
    rows, blocks = [row for row, _ in appended], [block for _, block in appended]
    packed = [codec.pack(column) for column in (removed, rows, blocks)]
    return messages.StepPlan(0, packed[0], list(new), packed[1], packed[2], b"", b"", b"", b"")


def new(row, num_tokens, computed=0, blocks=()) -> messages.NewSequence:
    tokens = codec.pack(range(100, 100 + num_tokens))
    return messages.NewSequence(
        row, "r", 0, tokens, num_tokens, computed, codec.pack(blocks), SamplingParams()
    )


def ints(*values) -> np.ndarray:
    return np.array(values, np.int32)


def send(batch: GpuBatch, step=None) -> None:
    slot = batch.take_slot()
    batch.fill(slot, step)
    batch.send(slot)
    batch.apply_changes()


def test_sequences_and_blocks_reach_the_device():
    batch = make_batch()
    batch.apply(plan([new(3, 20, blocks=[7, 8, 9, 10])], appended=[(3, 11), (5, 1), (3, 12)]))
    send(batch)
    assert batch.tokens_RL[3, :21].tolist() == [*range(100, 120), 0]
    assert batch.tables_GRB[:, 3, :4].tolist() == [[7, 9, 11, 0], [8, 10, 12, 0]]
    assert batch.tables_GRB[:, 5, :1].tolist() == [[1], [0]]
    batch.apply(plan(removed=[3], appended=[(5, 2), (5, 3)]))
    assert batch.is_changed
    send(batch)
    assert not batch.is_changed
    assert batch.tables_GRB[:, 5, :2].tolist() == [[1, 3], [2, 0]]


def test_a_taken_row_and_unknown_tokens_are_found_out():
    batch = make_batch()
    batch.apply(plan([new(3, 5)]))
    with pytest.raises(AssertionError, match="row 3 is taken"):
        batch.apply(plan([new(3, 5)]))
    with pytest.raises(AssertionError, match="tokens that aren't known"):
        batch.lay_out(ints(3), ints(6))
    with pytest.raises(AssertionError, match="nothing left"):
        batch.apply(plan([new(4, 5, computed=5)]))


def test_a_mixed_step_has_its_single_tokens_first():
    batch = make_batch()
    batch.apply(plan([new(0, 30), new(1, 9, computed=8), new(2, 4), new(3, 9, computed=3)]))
    step = batch.lay_out(ints(0, 1, 2, 3), ints(30, 1, 4, 1))
    assert step.rows.tolist() == [1, 3, 0, 2]  # 3 is a chunk of one token
    assert step.sampled.tolist() == [1, 0, 2]
    assert step.positions.tolist() == [9, 30, 4]
    assert step.last.tolist() == [0, 31, 35]
    assert (step.tokens, step.decodes, step.longest, step.longest_chunk) == (48, 2, 9, 30)
    assert not step.is_decode
    send(batch, step)
    assert batch.rows_S.tolist()[:5] == [1, 3, 0, 2, -1]
    assert batch.starts_S1.tolist()[:7] == [0, 1, 2, 32, 36, 36, 36]
    assert batch.context_S.tolist()[:5] == [9, 4, 30, 4, 0]
    assert batch.decode_context_S.tolist()[:4] == [9, 4, 0, 0]
    assert batch.sample_rows_N.tolist()[:4] == [1, 0, 2, -1]
    assert batch.last_N.tolist()[:3] == [0, 31, 35]


def test_a_decode_step_is_padded_with_inert_sequences():
    batch = make_batch()
    batch.apply(plan([new(row, 9, computed=8) for row in (4, 1, 2)]))
    step = batch.lay_out(ints(4, 1, 2), ints(1, 1, 1))
    assert (step.is_decode, step.tokens, step.decodes) == (True, 4, 4)
    send(batch, step)
    assert batch.rows_S.tolist()[:5] == [4, 1, 2, -1, -1]
    assert batch.starts_S1.tolist()[:6] == [0, 1, 2, 3, 4, 5]
    assert batch.last_N.tolist()[:5] == [0, 1, 2, 3, 4]
    assert batch.sample_positions_N.tolist()[:3] == [9, 9, 9]
    # What was sampled is known, though nobody here has seen it.
    again = batch.lay_out(ints(1), ints(1))
    assert (again.context.tolist(), again.tokens, again.positions.tolist()) == ([10], 1, [10])


def test_a_step_can_be_whole():
    batch = make_batch()
    batch.apply(plan([new(4, 9, computed=8), new(1, 9, computed=7)]))
    step = batch.lay_out(ints(4, 1), ints(1, 1), whole=True)
    assert (step.is_decode, step.tokens, step.decodes) == (False, 16, 0)
    assert step.rows.tolist() == [4, 1]
    assert step.sampled.tolist() == [4]


def test_a_slot_is_given_out_when_its_step_has_been_settled():
    batch = make_batch()
    settled = []
    first, second = batch.take_slot(), batch.take_slot()
    first.release = lambda: settled.append(1)
    second.release = lambda: settled.append(2)
    assert batch.take_slot() is first
    assert settled == [1]
    assert batch.take_slot() is second
    assert settled == [1, 2]


def test_changes_say_where_they_lie():
    changes = Changes()
    changes.add(0, 2, 1, ints(5, 6, 7))
    changes.add_each(ints(1, 2), ints(0, 1), ints(3, 2), ints(8, 9))
    assert (len(changes), changes.longest, changes.size) == (3, 3, 20)
    whole = torch.zeros(64, dtype=torch.int32)
    packed = changes.pack(10)
    whole[:2] = torch.tensor([3, 10])
    whole[10 : 10 + len(packed)] = torch.from_numpy(packed)
    tokens = torch.zeros(4, 8, dtype=torch.int32)
    tables = torch.zeros(2, 4, 5, dtype=torch.int32)
    apply_changes_reference(whole, tokens, tables)
    assert tokens[2].tolist() == [0, 5, 6, 7, 0, 0, 0, 0]
    assert (tables[0, 0, 3], tables[1, 1, 2], tables.sum()) == (8, 9, 17)


@pytest.mark.parametrize("most", [1, 2, 3, 6, 8, 9, 64, 100, 256, 1000])
def test_sizes_hold_every_batch(most):
    sizes = batch_sizes(most)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] >= most
    assert len(sizes) == 1 or sizes[-2] < most
    for count in range(1, most + 1):
        size = at_least(sizes, count)
        assert count <= size < count + max(8, count)
    assert batch_sizes(sizes[-1]) == sizes


def test_bounds_of_the_context():
    assert context_bounds(500) == [501]
    assert context_bounds(4096) == [1024, 4097]
    assert context_bounds(40960) == [1024, 8192, 40961]


@pytest.mark.parametrize("turn", [TURNS + 5, 3 * TURNS + 5])
def test_turns_begin_again(turn):
    batch = make_batch()
    batch.apply(plan([new(0, 3)]))
    slot = batch.take_slot()
    batch.turn = turn
    batch.fill(slot, batch.lay_out(ints(0), ints(3)))
    assert slot.numbers[TURN] == 5
