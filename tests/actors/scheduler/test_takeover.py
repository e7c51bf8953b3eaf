"""What a request needs to go on after a death, and what is left behind by the dead."""

import random

import pytest

from ringcast.actors.core import PeerLost
from ringcast.executor.fake_runner import expected_tokens
from ringcast.mq import codec, messages


def entries(engine, name):
    """The NewSequences of a request: (choice, tokens known, prompt tokens, tokens computed)."""
    return [
        (
            new.choice,
            codec.ints(new.token_ids).tolist(),
            new.num_prompt_tokens,
            new.num_computed_tokens,
        )
        for plan in engine.plans
        for new in plan.new
        if new.request_id == name
    ]


@pytest.mark.parametrize("num_resumed", [0, 1, 2, 7])
def test_a_choice_goes_on_behind_its_output(make_engine, num_resumed):
    engine = make_engine()
    prompt = list(range(10, 20))
    tokens = expected_tokens(prompt, 0, 8, engine.worker_spec)
    engine.add("a", prompt, incarnation=1, resume={0: tokens[:num_resumed]})
    engine.run()
    engine.assert_idle()
    assert engine.output("a", incarnation=1) == tokens
    end = engine.end("a", incarnation=1)
    assert (end.reason, end.num_tokens) == ("length", 8)
    assert entries(engine, "a") == [(0, prompt + tokens[:num_resumed], 10, 0)]
    (opened,) = engine.opened.values()
    assert codec.ints(opened.resumed).tolist() == tokens[:num_resumed]
    assert (opened.num_prompt_tokens, opened.incarnation) == (10, 1)
    indices = [i for step in engine.stream_steps for i in codec.ints(step.token_index).tolist()]
    assert indices == list(range(num_resumed, 8))


def test_only_the_choices_named_go_on_each_by_itself(make_engine):
    engine = make_engine()
    outputs = {c: expected_tokens(range(6), c, 8, engine.worker_spec) for c in range(4)}
    engine.add("a", range(6), incarnation=1, n=4, resume={3: outputs[3][:5], 1: []})
    engine.run()
    engine.assert_idle()
    assert {opened.choice for opened in engine.opened.values()} == {1, 3}
    for choice in (1, 3):
        assert engine.output("a", choice, incarnation=1) == outputs[choice]
    statistics = engine.core.statistics()
    assert statistics["forks"] == 0
    assert statistics["prompt_tokens"] == statistics["prefix_cache_queries"] == 6
    assert statistics["generation_tokens"] == 3 + 8


def test_a_request_without_output_begins_anew(make_engine):
    engine = make_engine()
    engine.add("a", range(6), incarnation=4, n=3)
    engine.run()
    engine.assert_idle()
    assert engine.core.statistics()["forks"] == 2


def test_lengths_count_from_the_prompt(make_engine, model_spec):
    tokens = expected_tokens(range(5), 0, 9, model_spec())
    stop = tokens[5]
    engine = make_engine(spec=model_spec(max_model_len=14))
    options = {"incarnation": 1, "resume": {0: tokens[:2]}}
    engine.add("max_tokens", range(5), max_tokens=6, **options)
    engine.add("context", range(5), max_tokens=None, **options)
    engine.add("stop", range(5), stop_token_ids=[stop], **options)
    engine.add("min_tokens", range(5), stop_token_ids=[stop], min_tokens=7, **options)
    engine.run()
    engine.assert_idle()
    ends = {name: engine.end(name, incarnation=1) for name, _ in engine.prompts}
    assert {name: (end.reason, end.num_tokens, end.stop_reason) for name, end in ends.items()} == {
        "max_tokens": ("length", 6, None),
        "context": ("length", 9, None),
        "stop": ("stop", 6, stop),
        "min_tokens": ("length", 8, None),
    }


@pytest.mark.parametrize("ready", [True, False])
def test_what_is_complete_already_ends_at_once(make_engine, model_spec, ready):
    tokens = expected_tokens(range(5), 0, 8, model_spec())
    engine = make_engine(spec=model_spec(eos_token_ids=[tokens[3]]), ready=ready)
    engine.add("length", range(5), incarnation=1, resume={0: tokens[:3]}, max_tokens=3)
    engine.add("eos", range(5), incarnation=1, resume={0: tokens[:4]})
    engine.add("both", range(5), incarnation=1, resume={0: tokens[:4]}, max_tokens=4)
    stop = {"stop_token_ids": [tokens[2]]}
    engine.add("stop", range(5), incarnation=1, resume={0: tokens[:3]}, **stop)
    engine.add("goes on", range(5), incarnation=1, resume={0: tokens[:3]}, min_tokens=4, **stop)
    if not ready:
        engine.flush()
        assert engine.core.num_unfinished == 5
        engine.worker_ready()
    engine.flush()
    assert {new.request_id for new in engine.plans[0].new} == {"goes on"}
    engine.run()
    engine.assert_idle()
    found = {name: engine.end(name, incarnation=1) for name, _ in engine.prompts}
    assert {n: (end.reason, end.num_tokens, end.stop_reason) for n, end in found.items()} == {
        "length": ("length", 3, None),
        "eos": ("stop", 4, None),
        "both": ("stop", 4, None),
        "stop": ("stop", 3, tokens[2]),
        "goes on": ("stop", 4, None),
    }


def test_a_smaller_cache_ends_what_it_has_no_room_for(make_engine, model_spec):
    tokens = expected_tokens(range(5), 0, 20, model_spec())
    engine = make_engine(num_gpu_blocks_override=4)  # 3 blocks, 12 slots
    engine.add("a", range(5), incarnation=1, max_tokens=100, resume={0: tokens[:7]})
    engine.add("b", range(5), incarnation=1, max_tokens=100, resume={0: tokens[:8]})
    engine.add("c", range(5), incarnation=1, max_tokens=100, resume={0: tokens[:20]})
    engine.add("d", range(12), incarnation=1, max_tokens=100, resume={0: [], 1: []}, n=2)
    engine.prompts["d", 1] = list(range(12))
    engine.run()
    engine.assert_idle()
    ends = [engine.end(name, incarnation=1) for name in "abcd"]
    assert [(end.reason, end.num_tokens) for end in ends] == [
        ("length", 8),
        ("length", 8),
        ("length", 20),
        ("error", 0),
    ]


def test_cached_tokens_are_of_the_prompt(make_engine):
    engine = make_engine()
    engine.add("a", range(20), max_tokens=20)
    for _ in range(15):
        engine.step()
    output = list(engine.tokens[engine.stream("a")])
    engine.lose_detokenizer()
    engine.add("a", range(20), incarnation=1, max_tokens=20, resume={0: output})
    engine.run()
    engine.assert_idle()
    assert engine.output("a", incarnation=1) == engine.expected("a", num_tokens=20)
    ((_, _, _, computed),) = entries(engine, "a")[1:]
    assert computed > 20  # of its own output, too
    assert engine.num_cached[engine.stream("a", incarnation=1)] == 20
    statistics = engine.core.statistics()
    assert (statistics["prefix_cache_queries"], statistics["prefix_cache_hits"]) == (40, 20)


def test_only_the_very_first_token_is_timed(make_engine):
    engine = make_engine()
    engine.now = 2.0
    tokens = expected_tokens(range(5), 1, 8, engine.worker_spec)
    engine.add("a", range(5), incarnation=1, n=3, resume={0: [], 1: tokens[:1]})
    engine.run()
    engine.assert_idle()
    statistics = engine.core.statistics()
    assert (statistics["first_tokens"], statistics["ttft_seconds"]) == (1, 2.0)


def test_a_stop_string_counts_from_the_output_s_beginning(make_engine):
    engine = make_engine()
    tokens = expected_tokens(range(5), 0, 3, engine.worker_spec)
    engine.add("a", range(5), incarnation=1, max_tokens=100, resume={0: tokens})
    for _ in range(4):
        engine.step()
    engine.stop(engine.stream("a", incarnation=1), 4)
    engine.run()
    engine.assert_idle()
    assert engine.end("a", incarnation=1).num_tokens == 4


def test_a_takeover_ends_the_older_incarnation(make_engine):
    engine = make_engine()
    engine.add("a", range(5), n=2)
    for _ in range(4):
        engine.step()
    outputs = {c: engine.tokens[engine.stream("a", c)][:1] for c in range(2)}
    engine.add("a", range(5), incarnation=1, n=2, resume=outputs)
    engine.run()
    engine.assert_idle()
    for choice in range(2):
        assert engine.end("a", choice).reason == "abort"
        assert engine.output("a", choice, incarnation=1) == engine.expected("a", choice)


def test_an_abort_is_of_older_incarnations_too(make_engine):
    engine = make_engine()
    engine.add("a", range(5), incarnation=1)
    engine.add("b", range(5), incarnation=2)
    engine.abort("a", incarnation=2)
    engine.abort("b", incarnation=1)
    engine.run()
    engine.assert_idle()
    assert engine.end("a", incarnation=1).reason == "abort"
    assert engine.end("b", incarnation=2).reason == "length"


@pytest.mark.parametrize("how", ["AbortClient", "PeerLost"])
def test_a_lost_client_s_requests_end_and_no_others(make_engine, how):
    engine = make_engine(max_num_seqs=2)
    engine.add("running", range(5), client=1)
    engine.add("other", range(6), client=11)
    engine.add("held", range(7), client=1, n=2)
    engine.add("waiting", range(8), client=0)
    engine.handle(messages.Ping(1, 5))
    engine.handle(messages.Ping(0, 6))
    engine.flush()
    engine.handle(messages.Ping(1, 7))
    engine.handle(messages.Ping(0, 8))
    if how == "PeerLost":
        engine.handle(PeerLost(), "client.1")
    engine.handle(messages.AbortClient(1))
    engine.run()
    engine.assert_idle()
    assert engine.end("running").reason == "abort"
    assert [engine.end("held", choice).reason for choice in (0, 1)] == ["abort", "abort"]
    assert engine.output("other") == engine.expected("other")
    assert engine.output("waiting") == engine.expected("waiting")
    assert {ping.number for ping in engine.pings} == {5, 6, 8}


def test_what_a_dead_tokenizer_still_sent_for_a_dead_client_ends(make_engine):
    engine = make_engine()
    engine.handle(PeerLost(), "client.1")
    engine.add("late", range(5), client=1)
    engine.add("other", range(6), client=0)
    engine.handle(PeerLost(), "tokenizer.0")  # it died with the client's AbortClient
    engine.add("new", range(7), client=1)
    engine.handle(PeerLost(), "tokenizer.0")
    engine.add("newer", range(7), client=2)
    engine.handle(messages.AbortClient(2))  # a word of the tokenizer, before the supervisor's
    engine.handle(PeerLost(), "client.2")
    engine.add("newest", range(7), client=2)
    engine.handle(PeerLost(), "tokenizer.0")
    engine.run()
    engine.assert_idle()
    assert engine.end("late").reason == "abort"
    assert engine.output("other") == engine.expected("other")
    assert engine.output("new") == engine.expected("new")
    assert engine.end("newer").reason == "abort"
    assert engine.output("newest") == engine.expected("newest")


def test_when_the_detokenizer_is_lost_every_stream_ends(make_engine):
    engine = make_engine(max_num_seqs=2, max_steps_in_flight=2)
    engine.add("running", range(5), n=3)
    engine.flush()
    engine.add("waiting", range(8))
    engine.flush()
    engine.answer()  # tokens and an opening lie in the outbox
    engine.add("new", range(9))
    assert engine.core.num_steps_in_flight
    engine.lose_detokenizer()
    engine.flush()
    assert all(engine.ends[stream][0].reason == "abort" for stream in engine.opened)
    assert engine.core.num_unfinished == 0
    assert engine.core.statistics()["free_blocks"] == 1023
    engine.add("waiting", range(8), incarnation=1)
    engine.run()
    engine.assert_idle()
    assert engine.output("waiting", incarnation=1) == engine.expected("waiting")


@pytest.mark.parametrize("name", ["tokenizer.0", "worker.0", "scheduler.0"])
def test_other_losses_are_not_its_business(make_engine, name):
    engine = make_engine()
    engine.add("a", range(5))
    engine.flush()
    engine.handle(PeerLost(), name)
    engine.run()
    engine.assert_idle()
    assert engine.output("a") == engine.expected("a")


def test_an_idle_engine_answers_a_ping_by_an_empty_step(make_engine):
    engine = make_engine()
    engine.add("a", range(5), max_tokens=1)
    engine.run()
    engine.handle(messages.Ping(3, 7))
    (send,) = engine.flush()
    assert isinstance(send.message, messages.StepPlan)
    assert (send.message.step, send.message.rows, send.message.new) == (1, b"", [])
    assert codec.ints(send.message.removed).tolist() == [0]  # the row of "a"
    assert engine.flush() == []
    assert engine.pings == []
    engine.answer()
    engine.flush()
    assert engine.pings == [messages.Ping(3, 7)]
    assert engine.flush() == []
    engine.assert_idle()


def test_a_ping_waits_for_a_step_that_is_sent_after_it(make_engine):
    engine = make_engine()
    engine.add("a", range(5), max_tokens=4)
    engine.flush()
    engine.handle(messages.Ping(0, 1))
    engine.flush()
    engine.answer()  # a step that was sent before
    engine.flush()
    assert engine.pings == []
    engine.answer()
    engine.flush()
    assert engine.pings == [messages.Ping(0, 1)]
    engine.run()
    engine.assert_idle()
    assert len(engine.plans) == 4


def test_with_steps_ahead_a_ping_adds_none(make_engine):
    engine = make_engine(max_steps_in_flight=3)
    engine.add("a", range(5), max_tokens=5)
    engine.flush()
    engine.handle(messages.Ping(0, 1))
    engine.flush()
    assert engine.core.num_steps_in_flight == 3
    engine.answer()
    engine.flush()
    assert engine.core.num_steps_in_flight == 3  # the last one was sent after the ping
    engine.run()
    engine.assert_idle()
    assert (len(engine.plans), engine.pings) == (5, [messages.Ping(0, 1)])


def test_a_ping_waits_for_the_workers(make_engine):
    engine = make_engine(ready=False)
    engine.handle(messages.Ping(0, 1))
    assert engine.flush() == []
    engine.worker_ready()
    engine.flush()
    engine.step()
    assert engine.pings == [messages.Ping(0, 1)]


class Ledger:
    """Requests, what of their output has arrived, and their takeovers."""

    def __init__(self, engine, rng):
        self.engine = engine
        self.rng = rng
        self.requests = {}  # by id: its options for `add`
        self.incarnations = {}
        self.finished = {}  # by (id, choice): its tokens
        self.resumed = {}  # the same: with which tokens it came last

    def add(self, name):
        rng = self.rng
        self.requests[name] = {
            "prompt": [rng.randrange(1000) for _ in range(rng.randrange(1, 20))],
            "n": rng.choice([1, 1, 2, 4]),
            "max_tokens": rng.choice([1, 3, 12, 30]),
        }
        self.incarnations[name] = 0
        self.engine.add(name, **self.requests[name])

    def take_over(self):
        """Every request that is open comes again, its choices cut somewhere in what has arrived."""
        self.collect()
        for name, request in self.requests.items():
            outputs = {c: self.output(name, c) for c in range(request["n"])}
            resume = {
                choice: output[: self.rng.randrange(len(output) + 1)]
                for choice, output in outputs.items()
                if (name, choice) not in self.finished
            }
            if not resume:
                continue
            self.incarnations[name] += 1
            self.resumed.update({(name, choice): output for choice, output in resume.items()})
            if len(resume) == request["n"] and not any(resume.values()):
                resume = {}
            self.engine.add(name, **request, incarnation=self.incarnations[name], resume=resume)

    def collect(self):
        for stream, opened in self.engine.opened.items():
            key = opened.request_id, opened.choice
            if opened.incarnation == self.incarnations[key[0]] and self.engine.ends[stream]:
                assert self.engine.ends[stream][0].reason == "length"
                self.finished[key] = self.engine.tokens[stream]

    def output(self, name, choice):
        engine, incarnation = self.engine, self.incarnations[name]
        try:
            return engine.tokens[engine.stream(name, choice, incarnation)]
        except StopIteration:  # this incarnation has not been heard of
            return self.resumed.get((name, choice), [])

    def check(self):
        self.collect()
        assert any(self.incarnations.values())
        for name, request in self.requests.items():
            for choice in range(request["n"]):
                expected = self.engine.expected(name, choice, request["max_tokens"])
                assert self.finished[name, choice] == expected


@pytest.mark.parametrize("ahead", [1, 3])
def test_losses_at_any_time_change_no_output(make_engine, ahead):
    for seed in range(8):
        rng = random.Random(f"{ahead} {seed}")
        engine = make_engine(
            num_gpu_blocks_override=16, max_num_batched_tokens=24, max_steps_in_flight=ahead
        )
        ledger = Ledger(engine, rng)
        for number in range(12):
            ledger.add(f"r{number}")
        engine.flush()
        for _ in range(6):
            for _ in range(rng.randrange(1, 15)):
                if engine.outputs and rng.random() < 0.8:
                    engine.answer()
                if rng.random() < 0.7:
                    engine.flush()
            rng.choice([engine.lose_detokenizer, engine.restart, lambda: None])()
            ledger.take_over()
        engine.run()
        engine.assert_idle()
        ledger.check()
