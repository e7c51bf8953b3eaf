"""The scheduler's behaviour, one scenario each, with a worker that checks every plan it gets."""

import pytest

from ringcast.mq import codec, messages


def rows_of(plan):
    return dict(
        zip(codec.ints(plan.rows).tolist(), codec.ints(plan.num_tokens).tolist(), strict=True)
    )


def test_a_request_runs_to_its_end(make_engine):
    engine = make_engine()
    engine.add("a", range(10, 20), max_tokens=5)
    engine.run()
    engine.assert_idle()
    assert engine.output("a") == engine.expected("a", num_tokens=5)
    assert engine.end("a").reason == "length"
    assert engine.end("a").num_tokens == 5
    assert [rows_of(plan) for plan in engine.plans] == [{0: 10}, *[{0: 1}] * 4]
    assert [plan.step for plan in engine.plans] == list(range(5))


def test_opening_comes_before_the_first_token_and_a_plan_before_both(make_engine):
    engine = make_engine()
    engine.add("a", [5], max_tokens=1)
    assert [send.to for send in engine.flush()] == ["workers", "detokenizer.0"]
    engine.answer()
    assert [send.to for send in engine.flush()] == ["detokenizer.0"]
    assert engine.flush() == []


def test_one_step_in_flight(make_engine):
    engine = make_engine()
    engine.add("a", range(5))
    engine.flush()
    engine.add("b", range(5))
    for _ in range(3):
        engine.flush()
    assert len(engine.plans) == 1
    assert engine.core.num_steps_in_flight == 1
    engine.run()
    engine.assert_idle()


def test_prefill_and_decode_share_steps(make_engine):
    engine = make_engine()
    engine.add("a", range(10))
    engine.step()
    engine.step()
    engine.add("b", range(100, 120))
    engine.step()
    assert rows_of(engine.plans[-1]) == {0: 1, 1: 20}
    engine.run()
    engine.assert_idle()
    assert engine.core.statistics()["mixed_steps"] == 1


def test_prompts_are_cut_to_the_budget_and_decode_goes_first(make_engine):
    engine = make_engine(max_num_batched_tokens=16)
    engine.add("a", range(8))
    engine.step()
    engine.add("b", range(100, 140))
    engine.run()
    engine.assert_idle()
    chunks = [rows_of(plan).get(1) for plan in engine.plans[1:4]]
    assert chunks == [15, 15, 10]
    assert all(rows_of(plan)[0] == 1 for plan in engine.plans[1:4])
    assert engine.core.statistics()["chunked_prefills"] == 2
    assert engine.output("b") == engine.expected("b")


def test_long_prompts_leave_room_for_others(make_engine):
    engine = make_engine(long_prefill_token_threshold=8)
    engine.add("a", range(20))
    engine.add("b", range(100, 105))
    engine.run()
    engine.assert_idle()
    assert [rows_of(plan)[0] for plan in engine.plans[:3]] == [8, 8, 4]
    assert rows_of(engine.plans[0])[1] == 5
    assert engine.core.statistics()["chunked_prefills"] == 2


def test_no_more_rows_than_asked_for(make_engine):
    engine = make_engine(max_num_seqs=3)
    for i in range(10):
        engine.add(f"r{i}", range(i * 10, i * 10 + 5), max_tokens=2 + i % 3)
    engine.run()
    engine.assert_idle()
    assert max(len(rows_of(plan)) for plan in engine.plans) == 3
    assert len({row for plan in engine.plans for row in rows_of(plan)}) == 3


def test_first_come_first_served(make_engine):
    engine = make_engine(max_num_seqs=1)
    for name in "cab":
        engine.add(name, range(5), max_tokens=1)
    engine.run()
    entered = [new.request_id for plan in engine.plans for new in plan.new]
    assert entered == ["c", "a", "b"]


def test_a_budget_below_the_number_of_running_sequences(make_engine):
    engine = make_engine(max_num_batched_tokens=2)
    for i in range(4):
        engine.add(f"r{i}", [i * 10], max_tokens=4)
    engine.run()
    engine.assert_idle()


def test_eos_ends_and_counts(make_engine, model_spec):
    engine = make_engine()
    engine.add("a", range(5))
    eos = engine.expected("a")[3]
    engine = make_engine(spec=model_spec(eos_token_ids=[2, eos]))
    engine.add("a", range(5))
    engine.add("ignoring", range(5), ignore_eos=True)
    engine.add("too early", range(5), min_tokens=5)
    engine.add("just in time", range(5), min_tokens=4)
    engine.run()
    engine.assert_idle()
    for name in ("a", "just in time"):
        end = engine.end(name)
        assert (end.reason, end.num_tokens, end.stop_reason) == ("stop", 4, None)
    for name in ("ignoring", "too early"):
        assert (engine.end(name).reason, engine.end(name).num_tokens) == ("length", 8)


def test_stop_token_ids_end_with_their_id(make_engine):
    engine = make_engine()
    engine.add("a", range(5))
    token = engine.expected("a")[2]
    engine.add("b", range(5), stop_token_ids=[token])
    engine.run()
    engine.assert_idle()
    end = engine.end("b")
    assert (end.reason, end.num_tokens, end.stop_reason) == ("stop", 3, token)
    assert engine.end("a").reason == "length"


def test_the_context_is_a_limit(make_engine, model_spec):
    engine = make_engine(spec=model_spec(max_model_len=12))
    engine.add("a", range(5), max_tokens=None)
    engine.run()
    engine.assert_idle()
    assert (engine.end("a").reason, engine.end("a").num_tokens) == ("length", 7)


def test_a_stop_string_cuts_and_frees(make_engine):
    engine = make_engine()
    engine.add("a", range(5), max_tokens=100)
    for _ in range(6):
        engine.step()
    engine.stop(engine.stream("a"), 3)
    assert engine.core.statistics()["free_blocks"] == 1023
    engine.run()
    engine.assert_idle()
    end = engine.end("a")
    assert (end.reason, end.num_tokens) == ("stop", 3)
    engine.stop(engine.stream("a"), 3)  # too late: nothing happens
    assert engine.flush() == []


def test_a_stop_before_the_first_token_it_counts_ends_the_stream_alone(make_engine):
    engine = make_engine()
    engine.add("a", range(5))
    engine.add("b", range(6))
    for _ in range(3):
        engine.step()
    engine.stop(engine.stream("a"), 0)  # the detokenizer could not read even the first
    engine.run()
    engine.assert_idle()
    assert (engine.end("a").reason, engine.end("a").num_tokens) == ("stop", 0)
    assert engine.output("b") == engine.expected("b")


def test_abort_frees_at_once_and_drops_what_is_in_flight(make_engine):
    engine = make_engine()
    engine.add("a", range(30), max_tokens=100)
    for _ in range(4):
        engine.step()
    num_tokens = len(engine.tokens[engine.stream("a")])
    engine.abort("a")  # a step is in flight
    assert engine.core.statistics()["free_blocks"] == 1023
    engine.add("b", range(100, 130))  # takes the row and the blocks in the next plan
    engine.run()
    engine.assert_idle()
    end = engine.end("a")
    assert (end.reason, end.num_tokens) == ("abort", num_tokens)
    assert engine.output("b") == engine.expected("b")


def test_abort_of_every_state(make_engine):
    engine = make_engine(max_num_seqs=1)
    engine.add("running", range(5), n=3)
    engine.add("waiting", range(5))
    engine.flush()
    assert engine.core.statistics()["waiting"] == 3
    for name in ("waiting", "running", "unknown"):
        engine.abort(name)
    assert engine.core.num_unfinished == 0
    engine.run()
    engine.assert_idle()
    assert {end.reason for ends in engine.ends.values() for end in ends} == {"abort"}
    assert len(engine.ends) == 4


def test_abort_of_another_incarnation_is_ignored(make_engine):
    engine = make_engine()
    engine.add("a", range(5), incarnation=3)
    engine.abort("a", incarnation=2)
    engine.run()
    engine.assert_idle()
    assert engine.end("a", incarnation=3).reason == "length"


def test_a_newer_incarnation_ends_the_old(make_engine):
    engine = make_engine()
    engine.add("a", range(5), incarnation=1, n=2)
    for _ in range(3):
        engine.step()
    old = [engine.stream("a", choice, incarnation=1) for choice in (0, 1)]
    engine.add("a", range(7), incarnation=2)
    engine.add("a", range(9), incarnation=2)
    engine.add("a", range(9), incarnation=1)
    engine.prompts["a", 1], engine.prompts["a", 2] = list(range(5)), list(range(7))
    engine.run()
    engine.assert_idle()
    assert [engine.ends[stream][0].reason for stream in old] == ["abort", "abort"]
    assert engine.output("a", incarnation=2) == engine.expected("a", incarnation=2)
    assert len(engine.opened) == 3


def test_prefixes_are_found_again(make_engine):
    engine = make_engine()
    engine.add("a", range(20))
    engine.run()
    engine.add("b", [*range(18), 900, 901])
    engine.add("c", [*range(20), *engine.output("a"), 900])  # output blocks count, too
    engine.run()
    engine.assert_idle()
    assert [engine.cached(name) for name in "abc"] == [0, 16, 24]
    statistics = engine.core.statistics()
    assert statistics["prefix_cache_hits"] == 40
    assert statistics["prefix_cache_queries"] == 20 + 20 + 29


def test_salted_prefixes_are_not(make_engine):
    engine = make_engine()
    engine.add("a", range(20), cache_salt="mine")
    engine.run()
    engine.add("b", range(20))
    engine.add("c", range(20), cache_salt="mine")
    engine.run()
    engine.assert_idle()
    assert [engine.cached(name) for name in "abc"] == [0, 0, 16]


def test_prefix_caching_can_be_turned_off(make_engine):
    engine = make_engine(enable_prefix_caching=False)
    for name in "ab":
        engine.add(name, range(20), n=2)
        engine.run()
    engine.assert_idle()
    statistics = engine.core.statistics()
    assert statistics["prefix_cache_hits"] == statistics["prefix_cache_queries"] == 0
    assert statistics["forks"] == 2
    assert engine.output("b", 1) == engine.expected("b", 1)


@pytest.mark.parametrize("caching", [True, False])
def test_preempted_sequences_come_back_unharmed(make_engine, caching):
    engine = make_engine(num_gpu_blocks_override=12, enable_prefix_caching=caching)
    for i in range(5):
        engine.add(f"r{i}", range(i * 20, i * 20 + 7), max_tokens=20)
    engine.run()
    engine.assert_idle()
    assert engine.core.statistics()["preemptions"] > 0
    for i in range(5):
        assert engine.output(f"r{i}") == engine.expected(f"r{i}", num_tokens=20)
    again = [new for plan in engine.plans for new in plan.new if len(new.token_ids) > 28]
    assert again
    assert {new.num_prompt_tokens for new in again} == {7}


def test_the_last_to_come_is_preempted(make_engine):
    engine = make_engine(num_gpu_blocks_override=6, max_num_seqs=2)
    engine.add("a", range(7), max_tokens=12)
    engine.add("b", range(20, 27), max_tokens=12)
    engine.add("c", range(40, 42), max_tokens=2)
    engine.run()
    engine.assert_idle()
    entered = [new.request_id for plan in engine.plans for new in plan.new]
    assert entered == ["a", "b", "b", "c"]  # and comes back before those that came later


def test_prompts_that_can_never_fit_are_refused_with_both_numbers(make_engine, model_spec):
    engine = make_engine(num_gpu_blocks_override=6)  # 5 blocks, 20 slots
    engine.add("fits", range(19), max_tokens=1)
    engine.add("doesn't", range(20), max_tokens=1, n=2)
    engine.add("empty", [], max_tokens=1)
    engine.run()
    engine.assert_idle()
    assert engine.end("fits").reason == "length"
    for choice in (0, 1):
        end = engine.end("doesn't", choice)
        assert (end.reason, end.num_tokens, end.error.status) == ("error", 0, 400)
        assert "has 20 tokens" in end.error.message
        assert "room for 20 tokens (5 blocks of 4)" in end.error.message
    assert "empty" in engine.end("empty").error.message
    engine = make_engine(spec=model_spec(max_model_len=16))
    engine.add("long", range(16))
    engine.run()
    error = engine.end("long").error
    assert "has 16 tokens, and the context is 16 tokens long" in error.message


def test_a_sequence_that_outgrows_all_blocks_ends(make_engine):
    engine = make_engine(num_gpu_blocks_override=4)  # 3 blocks, 12 slots
    engine.add("a", range(5), max_tokens=100)
    engine.add("b", range(20, 25), max_tokens=100)
    engine.run()
    engine.assert_idle()
    for name in "ab":  # the last token needs no slot
        assert (engine.end(name).reason, engine.end(name).num_tokens) == ("length", 8)


def test_requests_wait_for_the_workers(make_engine):
    engine = make_engine(ready=False, num_gpu_blocks_override=6)
    engine.add("a", range(5))
    engine.add("b", range(50))
    engine.add("c", range(5), n=2)
    engine.abort("c")
    engine.flush()
    assert not engine.plans
    assert engine.core.num_unfinished == 2
    engine.worker_ready()
    engine.run()
    engine.assert_idle()
    assert [engine.end(name).reason for name in "abc"] == ["length", "error", "abort"]


def test_all_ranks_must_be_ready_and_the_smallest_counts(model_spec):
    from ringcast.actors.scheduler.core import SchedulerCore
    from ringcast.mq.config import EngineConfig

    core = SchedulerCore(EngineConfig(), model_spec(), num_workers=2)
    core.handle("worker.0", messages.WorkerReady(0, 100, 16), 0.0)
    assert not core.ready
    core.handle("worker.1", messages.WorkerReady(1, 90, 16), 0.0)
    assert core.ready
    assert core.statistics()["num_blocks"] == 90
    with pytest.raises(AssertionError, match="ready twice"):
        core.handle("worker.1", messages.WorkerReady(1, 90, 16), 0.0)


def test_output_of_unknown_steps_and_rows_is_ignored(make_engine):
    engine = make_engine()
    engine.add("a", range(5))
    engine.flush()
    (output,) = engine.outputs
    rows, tokens = codec.ints(output.rows).tolist(), codec.ints(output.token_ids).tolist()
    engine.handle(messages.StepOutput(99, output.rows, output.token_ids), "worker.0")
    engine.outputs[0] = messages.StepOutput(
        output.step, codec.pack([7, *rows]), codec.pack([1, *tokens])
    )
    engine.answer()
    engine.handle(output, "worker.0")  # again
    engine.run()
    engine.assert_idle()


def test_statistics_of_a_busy_engine(make_engine):
    engine = make_engine(num_gpu_blocks_override=11, max_num_seqs=1)
    engine.add("a", range(10))
    engine.add("b", range(10))
    engine.flush()
    values = engine.core.statistics()
    assert (values["running"], values["waiting"]) == (1, 1)
    assert (values["num_blocks"], values["free_blocks"], values["kv_usage"]) == (11, 7, 0.3)
    engine.run()
    values = engine.core.statistics()
    assert (values["running"], values["waiting"], values["kv_usage"]) == (0, 0, 0.0)
    assert values["generation_tokens"] == 16
    assert values["prompt_tokens"] == 20
    assert values["steps"] == len(engine.plans)


def test_steps_and_first_tokens_are_timed(make_engine):
    engine = make_engine()
    engine.add("a", range(5), max_tokens=3)
    engine.now = 2.5
    engine.run()
    statistics = engine.core.statistics()
    assert (statistics["first_tokens"], statistics["ttft_seconds"]) == (1, 2.5)
    assert statistics["step_seconds"] > 0
