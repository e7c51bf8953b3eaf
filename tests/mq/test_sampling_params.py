"""Each bound of each field, and errors that name the field, the value and what is accepted."""

from __future__ import annotations

import math

import pytest

from ringcast.mq import codec
from ringcast.mq.errors import InvalidRequestError
from ringcast.mq.sampling_params import RequestOutputKind, SamplingParams


def nested(levels):
    """An object with so many lists in each other."""
    value = []
    for _ in range(levels - 1):
        value = [value]
    return {"a": value}


def endless():
    value = []
    value += [value, value]
    return {"a": value}


ACCEPTED = [
    ("n", [1, 128]),
    ("temperature", [0, 0.0, 1, 100.0]),
    ("top_p", [1e-9, 1, 1.0]),
    ("top_k", [-1, 0, 1, 2**31 - 1]),
    ("min_p", [0, 0.0, 1.0]),
    ("presence_penalty", [-2, 0, 2.0]),
    ("frequency_penalty", [-2.0, 0.0, 2]),
    ("repetition_penalty", [1e-9, 1, 1.0, 1e9]),
    ("logit_bias", [None, {}, {0: -100}, {2**31 - 1: 100.0, 5: 0}]),
    ("allowed_token_ids", [None, [0], (3, 1, 3)]),
    ("bad_words", ["x", ["x", " "], (), None, ["x"] * 1024]),
    ("seed", [None, 0, -(2**63), 2**63 - 1]),
    ("stop", ["x", ["x"], ("x",) * 16, (), None]),
    ("stop_token_ids", [(), [0], (1, 2), None]),
    ("include_stop_str_in_output", [True, False]),
    ("ignore_eos", [True, False]),
    ("max_tokens", [None, 1, 2**31 - 1]),
    ("min_tokens", [0, 16]),
    ("logprobs", [None, 0, 20]),
    ("prompt_logprobs", [None, 0, 20]),
    ("skip_special_tokens", [True, False]),
    ("detokenize", [True, False]),
    ("output_kind", list(RequestOutputKind)),
    ("extra_args", [None, {}, {"a": [1]}, {"a": [2**64 - 1, -(2**63), 0.5, "x"]}, nested(31)]),
]

REFUSED = [
    ("n", [0, -1, 129, 1.0, "1", None, True]),
    ("temperature", [-0.1, math.inf, math.nan, "1", None, True]),
    ("top_p", [0, 0.0, 1.01, -1, math.nan, "1", None, False]),
    ("top_k", [-2, 2**31, 1.5, "1", None, True]),
    ("min_p", [-0.1, 1.1, math.nan, "0", None]),
    ("presence_penalty", [-2.01, 2.01, math.nan, math.inf, "1", None, True]),
    ("frequency_penalty", [-2.01, 2.01, math.nan, "1", None, False]),
    ("repetition_penalty", [0, 0.0, 1e-31, 1e31, -1, math.inf, math.nan, "1", None, True]),
    (
        "logit_bias",
        [[5], {1: 101}, {1: -100.1}, {1: math.nan}, {1: "1"}, {1: True}, {-1: 1}, {"1": 1}],
    ),
    ("allowed_token_ids", [[], (), 5, [-1], [1.0], ["1"], [True], [2**31]]),
    ("bad_words", ["", [""], [1], ["x", ""], ["x"] * 1025]),
    ("seed", [2**63, -(2**63) - 1, 1.0, "1", True]),
    ("stop", ["", [""], [1], ["x", ""], ["x"] * 17]),
    ("stop_token_ids", [[-1], [1.0], ["1"], [True]]),
    ("include_stop_str_in_output", [1, "true", None]),
    ("ignore_eos", [0, "false", None]),
    ("max_tokens", [0, -1, 2**31, 1.0, "1", True]),
    ("min_tokens", [-1, 17, 1.0, None, True]),
    ("logprobs", [-1, 21, 1.0, True]),
    ("prompt_logprobs", [-1, 21, 1.0, True]),
    ("skip_special_tokens", [1, "true", None]),
    ("detokenize", [1, "true", None]),
    ("output_kind", [0, "DELTA", None]),
    ("extra_args", [[1], {1: 2}, "x", {"a": 2**64}, {"a": object()}, nested(32), endless()]),
]


def each(table):
    return [
        pytest.param(field, value, id=f"{field}={value!r:.20}")
        for field, cases in table
        for value in cases
    ]


@pytest.mark.parametrize(("field", "value"), each(ACCEPTED))
def test_what_is_accepted(field, value):
    params = SamplingParams(**{field: value})
    if field in ("stop", "bad_words", "stop_token_ids"):
        expected = (value,) if isinstance(value, str) else tuple(value or ())
        assert getattr(params, field) == expected
    elif field == "allowed_token_ids":
        assert params.allowed_token_ids == (value and tuple(value))
    else:
        assert getattr(params, field) == value


@pytest.mark.parametrize(("field", "value"), each(REFUSED))
def test_what_is_refused(field, value):
    with pytest.raises(InvalidRequestError, match=rf"^{field} must be .+, got ") as caught:
        SamplingParams(**{field: value})
    assert caught.value.param == field
    assert isinstance(caught.value, ValueError)
    assert caught.value.status == 400


def test_every_field_is_tested():
    fields = set(SamplingParams.__struct_fields__)
    assert {field for field, _ in ACCEPTED} == {field for field, _ in REFUSED} == fields


def test_min_tokens_is_bounded_by_max_tokens_where_there_is_one():
    SamplingParams(min_tokens=100, max_tokens=None)
    with pytest.raises(InvalidRequestError, match=r"min_tokens must be at most max_tokens \(5\)"):
        SamplingParams(min_tokens=6, max_tokens=5)


def test_unknown_fields_are_refused():
    with pytest.raises(TypeError, match="best_of"):
        SamplingParams(best_of=2)


def test_greedy_is_temperature_zero():
    assert SamplingParams(temperature=0).greedy
    assert not SamplingParams(temperature=1e-6).greedy


def test_a_long_value_is_shown_in_part():
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(n="9" * 1000)
    assert len(str(caught.value)) < 200


def test_stop_strings_need_text():
    SamplingParams(stop="x")
    with pytest.raises(InvalidRequestError, match="stop must be absent where detokenize is false"):
        SamplingParams(stop="x", detokenize=False)


def test_all_of_it_travels():
    params = SamplingParams(
        logit_bias={5: 1, 2**31 - 1: -2.5},
        allowed_token_ids=[1, 2],
        bad_words="one",
        output_kind=RequestOutputKind.DELTA,
        extra_args={"deep": {"a": [1, None]}},
        presence_penalty=1,
    )
    assert codec.Decoder(SamplingParams)(codec.encode(params)) == params


def test_only_penalties_penalise():
    assert not SamplingParams(repetition_penalty=1, logit_bias={1: 1}).penalised
    for field in ("presence_penalty", "frequency_penalty", "repetition_penalty"):
        assert SamplingParams(**{field: 0.5}).penalised
