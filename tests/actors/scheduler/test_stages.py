"""A scheduler of a pipeline: every stage has a batch of its own, and no row is in two of them."""

from __future__ import annotations

import pytest

from ringcast.mq import codec


def rows_of(plan):
    return codec.ints(plan.rows).tolist()


def counts_of(plan):
    return dict(zip(rows_of(plan), codec.ints(plan.num_tokens).tolist(), strict=True))


def test_two_batches_alternate(make_engine):
    engine = make_engine(pipeline_parallel_size=2)
    for i in range(8):
        engine.add(f"r{i}", range(10 * i, 10 * i + 5), max_tokens=20)
    engine.flush()
    assert [len(rows_of(plan)) for plan in engine.plans] == [8]  # their prompts
    engine.answer()
    engine.flush()
    for _ in range(12):
        engine.step()
    batches = [set(rows_of(plan)) for plan in engine.plans[1:]]
    assert len(batches) == 14
    first, second = batches[:2]
    assert len(first) == len(second) == 4
    assert first | second == set(range(8))
    assert batches == [first, second] * 7
    assert engine.core.num_steps_in_flight == 2
    engine.run()
    engine.assert_idle()
    assert engine.core.statistics()["overshoot_tokens"] == 0


@pytest.mark.parametrize(("stages", "sizes"), [(2, [5, 4]), (3, [3, 3, 3]), (4, [3, 3, 3])])
def test_batches_are_about_even(make_engine, stages, sizes):
    engine = make_engine(pipeline_parallel_size=stages, max_num_seqs=9)
    for i in range(9):
        engine.add(f"r{i}", range(10 * i, 10 * i + 5), max_tokens=9)
    engine.step()
    engine.step()
    assert [len(rows_of(plan)) for plan in engine.plans[1:]] == sizes
    engine.run()
    engine.assert_idle()


def test_a_new_row_fills_a_gap(make_engine):
    """Rows that come one by one spread over the stages by themselves."""
    engine = make_engine(pipeline_parallel_size=2)
    engine.add("a", range(5), max_tokens=30)
    engine.flush()
    engine.add("b", range(100, 105), max_tokens=30)
    engine.flush()
    assert [counts_of(plan) for plan in engine.plans] == [{0: 5}, {1: 5}]
    for _ in range(6):
        engine.step()
    assert [rows_of(plan) for plan in engine.plans[2:]] == [[0], [1]] * 3
    engine.run()
    engine.assert_idle()


def test_chunks_of_a_prompt_follow_one_another(make_engine):
    """They need no token that is in flight. The first decode does."""
    engine = make_engine(pipeline_parallel_size=3, long_prefill_token_threshold=4)
    engine.add("a", range(10))
    engine.flush()
    assert [counts_of(plan) for plan in engine.plans] == [{0: 4}, {0: 4}, {0: 2}]
    engine.answer()
    engine.answer()
    engine.flush()
    assert len(engine.plans) == 3
    engine.answer()
    engine.flush()
    assert counts_of(engine.plans[3]) == {0: 1}
    engine.run()
    engine.assert_idle()


def test_as_many_steps_as_stages_or_more(make_engine):
    for ahead, stages, depth in ((1, 3, 3), (4, 2, 4)):
        engine = make_engine(pipeline_parallel_size=stages, max_steps_in_flight=ahead)
        for i in range(6):
            engine.add(f"r{i}", range(10 * i, 10 * i + 40), max_tokens=9)
        engine.flush()
        assert engine.core.num_steps_in_flight == depth
        engine.run()
        engine.assert_idle()
