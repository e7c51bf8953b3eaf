"""What a step writes down, and says to the workers."""

import pytest

from ringcast.actors.scheduler.packed import Repacker
from ringcast.actors.scheduler.request import Request
from ringcast.actors.scheduler.step import Step
from ringcast.mq import codec, messages
from ringcast.mq.sampling_params import SamplingParams


@pytest.fixture
def sequence():
    message = messages.AddRequest(
        "r", 0, codec.pack(range(10)), SamplingParams(seed=0), messages.OutputSpec(0), 0.0
    )
    sequence = Request(message, iter([0]), [2], 512).leading[0]
    sequence.row = 3
    return sequence


def test_a_part_of_the_known_tokens_is_a_chunk(sequence):
    step = Step(5)
    step.compute(sequence, 4)
    assert step.chunks == [(sequence, 4)]
    assert sequence.num_computed == 4
    step = Step(6)
    step.compute(sequence, 6)
    assert step.chunks == []
    assert step.num_prefills == 1


def test_the_plan_says_it_all(sequence):
    step = Step(5)
    step.enter(sequence)
    step.appended.append((3, 8))
    step.copies.append((1, 2))
    step.compute(sequence, 10)
    plan = step.plan([7], Repacker())
    fields = (plan.removed, plan.block_rows, plan.block_ids, plan.copy_from, plan.copy_to)
    assert [codec.ints(field).tolist() for field in fields] == [[7], [3], [8], [1], [2]]
    assert codec.ints(plan.rows).tolist() == [3]
    assert codec.ints(plan.num_tokens).tolist() == [10]
    (new,) = plan.new
    assert (new.row, new.num_computed_tokens, new.num_prompt_tokens) == (3, 0, 10)
    assert codec.ints(new.token_ids).tolist() == list(range(10))
