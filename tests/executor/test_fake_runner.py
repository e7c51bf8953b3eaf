"""The fake runner notices whatever a scheduler may do wrong."""

import time

import pytest

from ringcast.executor.fake_runner import FakeModelRunner, expected_tokens, fake_token
from ringcast.mq import codec, messages
from ringcast.mq.config import EngineConfig, ModelSpec
from ringcast.mq.errors import ConfigError
from ringcast.mq.sampling_params import SamplingParams


def make_spec(vocab_size=1000, eos_token_ids=(2,)):
    return ModelSpec(
        name="fake",
        path="",
        tokenizer_path="",
        architecture="Fake",
        vocab_size=vocab_size,
        max_model_len=512,
        eos_token_ids=list(eos_token_ids),
        hf_config={},
    )


def make_runner(**options):
    defaults = {"block_size": 4, "max_num_seqs": 4, "num_gpu_blocks_override": 10}
    runner = FakeModelRunner(EngineConfig(**{**defaults, **options}), make_spec())
    runner.load(lambda *_: None)
    return runner


def new(row, tokens, blocks, computed=0, num_prompt=None, choice=0, **params):
    return messages.NewSequence(
        row=row,
        request_id="r",
        choice=choice,
        token_ids=codec.pack(tokens),
        num_prompt_tokens=len(tokens) if num_prompt is None else num_prompt,
        num_computed_tokens=computed,
        block_ids=codec.pack(blocks),
        params=SamplingParams(seed=0, **params),
    )


def plan(step, rows, new=(), removed=(), appended=(), copies=()):
    return messages.StepPlan(
        step=step,
        removed=codec.pack(removed),
        new=list(new),
        block_rows=codec.pack([row for row, _ in appended]),
        block_ids=codec.pack([block for _, block in appended]),
        copy_from=codec.pack([source for source, _ in copies]),
        copy_to=codec.pack([target for _, target in copies]),
        rows=codec.pack(list(rows)),
        num_tokens=codec.pack(list(rows.values())),
    )


def answer(output):
    rows, tokens = codec.ints(output.rows).tolist(), codec.ints(output.token_ids).tolist()
    return dict(zip(rows, tokens, strict=True))


def test_tokens_are_those_expected():
    runner = make_runner()
    prompt = [5, 6, 7, 8, 9]
    output = answer(runner.execute(plan(0, {1: 5}, new=[new(1, prompt, [3, 4])])))
    tokens = [output[1]]
    for step in range(1, 4):
        output = answer(runner.execute(plan(step, {1: 1})))
        tokens.append(output[1])
    assert tokens == expected_tokens(prompt, 0, 4, make_spec())


def test_a_chunk_is_not_sampled():
    runner = make_runner()
    assert answer(runner.execute(plan(0, {0: 3}, new=[new(0, range(5), [1, 2])]))) == {}
    assert answer(runner.execute(plan(1, {0: 2}))).keys() == {0}
    assert answer(runner.execute(plan(2, {}, removed=[0]))) == {}


def test_tokens_depend_on_choice_and_prompt_and_are_never_special():
    spec = make_spec(vocab_size=300, eos_token_ids=range(100, 110))
    outputs = {
        tuple(expected_tokens(prompt, choice, 50, spec))
        for prompt in ([1], [2], [1, 2])
        for choice in range(3)
    }
    assert len(outputs) == 9
    tokens = {token for output in outputs for token in output}
    assert len(tokens) > 100
    assert tokens <= {*range(75, 100), *range(110, 300)}
    assert all(fake_token(0, 0, i, 0, 8, [3, 4]) in {2, 5, 6, 7} for i in range(100))


def test_a_copied_block_serves_a_fork():
    runner = make_runner()
    prompt = [5, 6, 7]
    runner.execute(plan(0, {0: 3}, new=[new(0, prompt, [1])]))
    fork = new(1, prompt, [2], computed=2, choice=1)
    output = answer(runner.execute(plan(1, {0: 1, 1: 1}, new=[fork], copies=[(1, 2)])))
    assert [output[1]] == expected_tokens(prompt, 1, 1, make_spec())


MISTAKES = {
    "not computed": (
        [plan(0, {0: 1}, new=[new(0, range(5), [1, 2], computed=4)])],
        "the KV of token 0 is not its own",
    ),
    "aliased blocks": (
        [
            plan(0, {0: 4}, new=[new(0, range(5), [1, 2])]),
            plan(1, {1: 4}, new=[new(1, range(10, 15), [1, 3])]),
            plan(2, {0: 1}),
        ],
        "row 0: the KV of token 0 is not its own",
    ),
    "same tokens, other prefix": (
        [
            plan(0, {0: 8}, new=[new(0, [1, 1, 1, 1, 2, 2, 2, 2], [1, 2])]),
            plan(1, {1: 4}, new=[new(1, [3, 3, 3, 3], [3])]),
            plan(2, {2: 1}, new=[new(2, [3, 3, 3, 3, 2, 2, 2, 2, 9], [3, 2, 4], computed=8)]),
        ],
        "the KV of token 4 is not its own",
    ),
    "no copy": (
        [
            plan(0, {0: 3}, new=[new(0, [5, 6, 7], [1])]),
            plan(1, {1: 1}, new=[new(1, [5, 6, 7], [2], computed=2)]),
        ],
        "the KV of token 0 is not its own",
    ),
    "written twice": (
        [plan(0, {0: 2, 1: 2}, new=[new(0, [1, 2], [1]), new(1, [1, 2], [1])])],
        "row 1 writes where another does",
    ),
    "no block": ([plan(0, {0: 5}, new=[new(0, range(5), [1])])], "no block for token 4"),
    "null block": ([plan(0, {0: 2}, new=[new(0, range(2), [0])])], "no such block"),
    "unknown block": ([plan(0, {0: 2}, new=[new(0, range(2), [10])])], "no such block"),
    "row in use": (
        [
            plan(0, {0: 2}, new=[new(0, range(2), [1])]),
            plan(1, {0: 2}, new=[new(0, range(2), [2])]),
        ],
        "row 0 was given out twice",
    ),
    "no such row": ([plan(0, {4: 2}, new=[new(4, range(2), [1])])], "there is no row 4"),
    "row not in use": ([plan(0, {}, removed=[1])], "removed row 1 is not in use"),
    "nothing to compute": (
        [plan(0, {0: 1}, new=[new(0, range(2), [1], computed=2)])],
        "nothing is left",
    ),
    "too many tokens": ([plan(0, {0: 3}, new=[new(0, range(2), [1])])], "can't compute 3"),
    "no tokens": ([plan(0, {0: 0}, new=[new(0, range(2), [1])])], "can't compute 0"),
    "over budget": (
        [plan(0, {0: 9}, new=[new(0, range(9), [1, 2, 3])])],
        "9 tokens in one step, and the budget is 8",
    ),
    "a step is missing": ([plan(1, {})], "step 1 came, not 0"),
    "null copy": ([plan(0, {}, copies=[(1, 0)])], "block 0 can't be copied to"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_noticed(mistake):
    plans, message = MISTAKES[mistake]
    runner = make_runner(max_num_batched_tokens=8)
    for good in plans[:-1]:
        runner.execute(good)
    with pytest.raises(AssertionError, match=message):
        runner.execute(plans[-1])


def test_logprobs_are_as_wide_as_asked():
    runner = make_runner()
    sequences = [new(0, [5], [1], logprobs=2), new(1, [6], [2]), new(2, [7], [3], logprobs=0)]
    output = runner.execute(plan(0, {0: 1, 1: 1, 2: 1}, new=sequences))
    tokens = codec.ints(output.token_ids)
    found = output.logprobs
    assert found.width == 3
    assert codec.ints(found.index).tolist() == [0, 2]
    ids = codec.ints(found.token_ids).reshape(2, 3).tolist()
    assert ids == [[tokens[0], tokens[0], tokens[0] + 1], [tokens[2], -1, -1]]
    values = codec.floats(found.logprobs).reshape(2, 3)
    assert values[0, 0] == values[0, 1] > values[0, 2] > -2
    assert codec.ints(found.rank).tolist() == [1, 1]


def test_what_it_says_when_loaded(monkeypatch):
    said = []
    runner = FakeModelRunner(EngineConfig(block_size=8), make_spec(), rank=1)
    assert runner.load(lambda *what: said.append(what)) == messages.WorkerReady(1, 1024, 8)
    assert said == [("loading no model", 1, 1)]
    assert runner.details()["num_blocks"] == 1024


def test_steps_take_the_time_they_are_told(monkeypatch):
    monkeypatch.setenv("RINGCAST_FAKE_STEP_SECONDS", "0.02")
    runner = make_runner()
    start = time.perf_counter()
    output = runner.execute(plan(0, {}))
    assert time.perf_counter() - start >= output.seconds >= 0.02
    monkeypatch.setenv("RINGCAST_FAKE_STEP_SECONDS", "soon")
    with pytest.raises(
        ConfigError, match="RINGCAST_FAKE_STEP_SECONDS must be a number, got 'soon'"
    ):
        make_runner()


def test_one_that_trusts_takes_wrong_plans_and_says_the_same(monkeypatch):
    tokens = [5, 6, 7, 8, 9]
    wrong = new(0, tokens, [1])  # 5 tokens, and a block of 4
    with pytest.raises(AssertionError, match="no block"):
        make_runner().execute(plan(0, {0: 5}, new=[wrong]))
    monkeypatch.setenv("RINGCAST_FAKE_TRUST", "1")
    runner = make_runner()
    said = [runner.execute(plan(0, {0: 3}, new=[wrong])), runner.execute(plan(1, {0: 2}))]
    said.append(runner.execute(plan(2, {0: 1})))
    got = [codec.ints(output.token_ids).tolist() for output in said]
    first, second = expected_tokens(tokens, 0, 2, make_spec())
    assert got == [[], [first], [second]]
