"""Choices that fork from one prefill, and those that can't just then."""

import pytest


def test_abort_of_a_fork_before_its_first_plan(make_engine):
    engine = make_engine()
    engine.add("a", range(6), n=3)
    engine.flush()
    engine.answer()
    engine.core.check()
    assert len(engine.core.planner.forks) == 2
    engine.abort("a")
    engine.run()
    engine.assert_idle()


@pytest.mark.parametrize("length", [1, 2, 4, 5, 8, 11])
def test_choices_fork_from_one_prefill(make_engine, length):
    engine = make_engine()
    engine.add("a", range(length), n=4)
    engine.run()
    engine.assert_idle()
    statistics = engine.core.statistics()
    assert statistics["forks"] == 3
    assert statistics["prompt_tokens"] == length
    # one prefill, the last prompt token of each fork, and all output tokens but each choice's last
    assert statistics["scheduled_tokens"] == length + 3 + 4 * 7
    outputs = [engine.output("a", choice) for choice in range(4)]
    assert outputs == [engine.expected("a", choice) for choice in range(4)]
    assert len({tuple(output) for output in outputs}) == 4
    copies = [len(plan.copy_to) // 4 for plan in engine.plans]
    assert sum(copies) == (0 if length % 4 == 1 else 3)


def test_choices_fork_even_if_the_first_ends_at_once(make_engine):
    engine = make_engine(enable_prefix_caching=False)
    engine.add("a", range(11), n=3, max_tokens=1)
    engine.run()
    engine.assert_idle()
    assert engine.core.statistics()["forks"] == 2
    assert len(engine.plans) == 2


def test_choices_without_a_row_enter_later_by_the_prefix_cache(make_engine):
    engine = make_engine(max_num_seqs=2)
    engine.add("a", range(10), n=5)
    engine.run()
    engine.assert_idle()
    assert engine.core.statistics()["forks"] == 1
    late = [new for plan in engine.plans for new in plan.new if new.choice >= 2]
    assert [new.num_computed_tokens for new in late] == [8, 8, 8]


def test_choices_count_as_one_prompt(make_engine):
    engine = make_engine(max_num_seqs=2)
    engine.add("a", range(10))
    engine.run()
    engine.add("b", range(10), n=3)
    engine.run()
    engine.assert_idle()
    assert [engine.cached("b", choice) for choice in range(3)] == [8, 8, 8]
    statistics = engine.core.statistics()
    assert statistics["prompt_tokens"] == statistics["prefix_cache_queries"] == 20
    assert statistics["prefix_cache_hits"] == 8


def test_choices_without_a_block_enter_later(make_engine):
    engine = make_engine(num_gpu_blocks_override=5)  # 4 blocks
    engine.add("a", range(15), n=3, max_tokens=1)
    engine.run()
    engine.assert_idle()
    assert engine.core.statistics()["forks"] == 0


def test_forks_give_way_to_running_sequences(make_engine):
    engine = make_engine(num_gpu_blocks_override=8)  # 7 blocks
    engine.add("a", range(8), max_tokens=3)  # 3 blocks once it decodes
    engine.add("b", range(50, 58), n=5, max_tokens=3)
    engine.flush()
    engine.answer()
    assert len(engine.core.planner.forks) == 3  # of 7 blocks they have 3, and 2 are wanted
    engine.flush()
    statistics = engine.core.statistics()
    assert (statistics["forks"], statistics["preemptions"]) == (1, 0)
    engine.run()
    engine.assert_idle()
