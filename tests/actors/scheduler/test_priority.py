"""Priorities: who enters first, who gives way to whom, and who never does."""

import pytest

from ringcast.mq import codec


def entered(engine):
    return [new.request_id for plan in engine.plans for new in plan.new]


def rows_of(plan):
    rows, num_tokens = codec.ints(plan.rows).tolist(), codec.ints(plan.num_tokens).tolist()
    return dict(zip(rows, num_tokens, strict=True))


@pytest.fixture
def make(make_engine):
    def make(**options):
        return make_engine(scheduling_policy="priority", **options)

    return make


def finish(engine):
    engine.run()
    engine.assert_idle()
    for request_id, incarnation in engine.prompts:
        assert engine.output(request_id, incarnation=incarnation) == engine.expected(request_id)


def test_the_most_urgent_enter_first_and_equals_as_they_came(make):
    engine = make(max_num_seqs=1)
    for name, priority in [("a", 3), ("b", -1), ("c", 3), ("d", 0), ("e", -1)]:
        engine.add(name, range(5), priority=priority, max_tokens=8)
    finish(engine)
    assert entered(engine) == ["b", "e", "d", "a", "c"]


def test_an_urgent_one_takes_the_row_of_the_last(make):
    engine = make(max_num_seqs=2)
    engine.add("a", range(5), priority=1)
    engine.add("b", range(9), priority=1)
    engine.step()
    engine.add("c", range(7), priority=0)
    finish(engine)
    assert entered(engine) == ["a", "b", "c", "b"]
    assert engine.core.statistics()["preemptions"] == 1


def test_equals_never_take_a_row(make):
    engine = make(max_num_seqs=1)
    engine.add("a", range(5), priority=1)
    engine.step()
    engine.add("b", range(5), priority=1)
    engine.add("c", range(5), priority=2)
    finish(engine)
    assert entered(engine) == ["a", "b", "c"]
    assert engine.core.statistics()["preemptions"] == 0


def test_an_urgent_one_takes_blocks_from_as_many_as_it_needs(make):
    engine = make(num_gpu_blocks_override=13, enable_prefix_caching=False)  # 12 blocks of 4
    for i in range(4):
        engine.add(f"r{i}", range(i * 20, i * 20 + 9), priority=i)
    engine.step()
    engine.add("u", range(100, 121), priority=1)  # 6 blocks
    engine.step()
    assert engine.core.statistics()["preemptions"] == 2
    assert [row for row in engine.plans[-1].new if row.request_id == "u"]
    finish(engine)


def test_nobody_is_preempted_in_vain(make):
    """Without the less urgent there would still be too few blocks, so they may go on."""
    engine = make(num_gpu_blocks_override=13, enable_prefix_caching=False)
    engine.add("first", range(20), priority=0, max_tokens=8)  # 5 blocks, and 7 in the end
    engine.add("last", range(30, 35), priority=9, max_tokens=8)
    engine.step()
    engine.step()
    engine.add("u", range(100, 128), priority=1, max_tokens=8)  # 7 and more
    engine.step()
    assert engine.core.statistics()["preemptions"] == 0
    assert len(rows_of(engine.plans[-1])) == 2
    finish(engine)


def test_a_shared_prefix_needs_no_second_blocks(make):
    """What the urgent one shares with those who stay is there already."""
    engine = make(num_gpu_blocks_override=11)  # 10 blocks
    engine.add("a", range(24), priority=0)
    engine.step()
    engine.step()  # its blocks are registered
    engine.add("b", range(50, 58), priority=5)
    engine.step()
    engine.add("u", [*range(24), *range(200, 207)], priority=1)  # 8 blocks, of which 6 are a's
    engine.step()
    assert entered(engine) == ["a", "b", "u"]
    assert engine.core.statistics()["preemptions"] == 1
    finish(engine)


def test_the_last_in_order_gives_way_when_blocks_run_out(make):
    """Which is not the last that entered."""
    engine = make(num_gpu_blocks_override=7, enable_prefix_caching=False)
    engine.add("low", range(7), priority=7, max_tokens=8)
    engine.step()
    engine.add("high", range(20, 27), priority=2, max_tokens=8)
    for _ in range(20):
        engine.step()
    assert entered(engine) == ["low", "high", "low"]
    finish(engine)


def test_urgent_prompts_come_before_the_chunks_of_others(make):
    engine = make(max_num_batched_tokens=8)
    engine.add("long", range(40), priority=1)
    engine.step()
    engine.add("u", range(100, 106), priority=0)
    engine.step()
    assert rows_of(engine.plans[-1]) == {1: 6, 0: 2}
    finish(engine)


def test_the_less_urgent_fill_what_is_left(make):
    engine = make(max_num_batched_tokens=8)
    engine.add("u", range(6), priority=0)
    engine.add("low", range(100, 110), priority=4)
    engine.step()
    assert rows_of(engine.plans[0]) == {0: 6, 1: 2}
    finish(engine)


def test_forks_have_their_requests_priority(make):
    """A less urgent running sequence gives itself up rather than take the blocks of forks."""
    engine = make(num_gpu_blocks_override=8, enable_prefix_caching=False)  # 7 blocks
    engine.add("low", range(8), priority=5, max_tokens=3)
    engine.add("forks", range(50, 58), priority=1, n=5, max_tokens=3)
    engine.flush()
    engine.answer()
    assert len(engine.core.planner.forks) == 3
    engine.flush()
    statistics = engine.core.statistics()
    assert (statistics["forks"], statistics["preemptions"]) == (3, 1)
    engine.run()
    engine.assert_idle()


def test_a_takeover_keeps_its_priority(make):
    engine = make(max_num_seqs=1)
    engine.add("low", range(5), priority=5)
    engine.add("u", range(30, 35), priority=1)
    engine.step()
    engine.add("u", range(30, 35), incarnation=1, priority=1, resume={0: engine.expected("u")[:2]})
    engine.add("u2", range(40, 45), priority=3)
    engine.run()
    engine.assert_idle()
    assert entered(engine) == ["u", "u", "u2", "low"]
