"""How many prompts are computed in parts at a time, and how many of them may be long."""

import pytest

from ringcast.mq import codec
from ringcast.mq.config import EngineConfig, build
from ringcast.mq.errors import ConfigError


def by_request(engine):
    """For each plan: request -> tokens."""
    out, names = [], {}
    for plan in engine.plans:
        names |= {new.row: new.request_id for new in plan.new}
        rows, num_tokens = codec.ints(plan.rows).tolist(), codec.ints(plan.num_tokens).tolist()
        out.append({names[row]: count for row, count in zip(rows, num_tokens, strict=True)})
    return out


def test_without_a_limit_all_are_cut(make_engine):
    engine = make_engine(long_prefill_token_threshold=8)
    for i in range(3):
        engine.add(f"r{i}", range(i * 50, i * 50 + 20))
    engine.run()
    engine.assert_idle()
    assert by_request(engine)[:3] == [{"r0": n, "r1": n, "r2": n} for n in (8, 8, 4)]


def test_only_so_many_are_partial(make_engine):
    engine = make_engine(long_prefill_token_threshold=8, max_num_partial_prefills=2)
    for i in range(3):
        engine.add(f"r{i}", range(i * 50, i * 50 + 20))
    engine.run()
    engine.assert_idle()
    assert by_request(engine)[:4] == [
        {"r0": 8, "r1": 8},
        {"r0": 8, "r1": 8},
        {"r0": 4, "r1": 4, "r2": 8},  # the first two are whole after this
        {"r0": 1, "r1": 1, "r2": 8},
    ]


def test_nobody_passes_who_waits_for_the_number_of_partial_ones(make_engine):
    engine = make_engine(long_prefill_token_threshold=8, max_num_partial_prefills=1)
    engine.add("a", range(20))
    engine.add("b", range(50, 70))
    engine.add("c", range(100, 105))
    engine.run()
    engine.assert_idle()
    assert by_request(engine)[:3] == [{"a": 8}, {"a": 8}, {"a": 4, "b": 8, "c": 5}]


def test_what_fits_whole_may_enter_beside_a_partial_one(make_engine):
    engine = make_engine(long_prefill_token_threshold=8, max_num_partial_prefills=1)
    engine.add("a", range(20))
    engine.add("b", range(50, 58))
    engine.run()
    engine.assert_idle()
    assert by_request(engine)[0] == {"a": 8, "b": 8}


def test_short_prompts_pass_long_ones(make_engine):
    engine = make_engine(
        long_prefill_token_threshold=8, max_num_partial_prefills=3, max_long_partial_prefills=1
    )
    for name, length in [("long0", 20), ("long1", 20), ("long2", 9), ("short0", 8), ("short1", 3)]:
        engine.add(name, range(len(engine.prompts) * 50, len(engine.prompts) * 50 + length))
    engine.run()
    engine.assert_idle()
    plans = by_request(engine)
    assert plans[0] == {"long0": 8, "short0": 8, "short1": 3}
    assert plans[2] == {"long0": 4, "short0": 1, "short1": 1, "long1": 8}
    assert [next(i for i, plan in enumerate(plans) if "long2" in plan)] == [4]


def test_long_prompts_are_not_starved_by_short_ones(make_engine):
    """Short ones never stop to come, and fill rows and budget."""
    engine = make_engine(
        long_prefill_token_threshold=8, max_long_partial_prefills=1, max_num_batched_tokens=16
    )
    for i in range(3):
        engine.add(f"long{i}", range(i * 50, i * 50 + 40), max_tokens=4)
    for step in range(200):
        engine.add(f"short{step}", [500 + step % 400, 7, step % 90], max_tokens=4)
        engine.step()
    for i in range(3):
        assert engine.end(f"long{i}").reason == "length"
    engine.run()
    engine.assert_idle()
    assert next(i for i, plan in enumerate(by_request(engine)) if "long2" in plan) < 40


def test_the_urgent_do_not_wait_for_partial_ones_of_others(make_engine):
    engine = make_engine(
        scheduling_policy="priority",
        long_prefill_token_threshold=8,
        max_num_partial_prefills=1,
    )
    engine.add("low", range(30), priority=1)
    engine.step()
    engine.add("u", range(50, 70), priority=0)
    engine.add("next", range(100, 120), priority=0)
    engine.step()
    assert by_request(engine)[1] == {"u": 8, "low": 8}
    engine.run()
    engine.assert_idle()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_long_partial_prefills": 1}, "needs long_prefill_token_threshold"),
        (
            {
                "max_long_partial_prefills": 3,
                "max_num_partial_prefills": 2,
                "long_prefill_token_threshold": 8,
            },
            "max_long_partial_prefills = 3: must be at most max_num_partial_prefills, which is 2",
        ),
        ({"max_num_partial_prefills": -1}, "max_num_partial_prefills = -1"),
        ({"scheduling_policy": "lifo"}, "scheduling_policy = 'lifo'"),
    ],
)
def test_options_that_contradict_each_other(options, words):
    with pytest.raises(ConfigError, match=words):
        build(EngineConfig, options)
