"""Frequencies against transformers', for every kind."""

from __future__ import annotations

import pytest
import torch
import transformers
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from ringcast.executor import rope
from ringcast.mq.errors import ModelLoadError

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
KINDS = [
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 2.5},
    LLAMA3,
    YARN,
    YARN | {"beta_fast": 20, "beta_slow": 2, "truncate": False},
    YARN | {"attention_factor": 1.3},
    YARN | {"mscale": 0.8, "mscale_all_dim": 0.5},
    YARN | {"factor": 1.0},
]


def config_of(parameters: dict[str, object]) -> transformers.LlamaConfig:
    return transformers.LlamaConfig(
        hidden_size=128,
        num_attention_heads=2,
        max_position_embeddings=1024,
        rope_parameters=parameters | {"rope_theta": 5000.0},
    )


@pytest.mark.parametrize("parameters", KINDS, ids=str)
def test_frequencies(parameters):
    config = config_of(parameters)
    expected = LlamaRotaryEmbedding(config)
    actual, scale = rope.frequencies(rope.read_parameters(config.to_dict()), 64, 1024)
    torch.testing.assert_close(actual, expected.inv_freq, rtol=1e-6, atol=0)
    assert scale == pytest.approx(expected.attention_scaling)


@pytest.mark.parametrize("length", [500, 1024, 3000])
def test_dynamic_frequencies_are_those_of_the_longest_sequence(length):
    config = config_of({"rope_type": "dynamic", "factor": 2.0})
    expected = LlamaRotaryEmbedding(config)
    expected(torch.zeros(1), torch.tensor([[length - 1]]))
    actual, scale = rope.frequencies(rope.read_parameters(config.to_dict()), 64, length)
    torch.testing.assert_close(actual, expected.inv_freq, rtol=1e-6, atol=0)
    assert scale == 1.0


@pytest.mark.parametrize("key", ["type", "rope_type"])
def test_configs_from_before_transformers_5(key):
    old = {"rope_theta": 7.0, "rope_scaling": {key: "linear", "factor": 3.0}}
    new = {"rope_parameters": {"rope_type": "linear", "rope_theta": 7.0, "factor": 3.0}}
    for hf_config in (old, new):
        parameters = rope.read_parameters(hf_config | {"max_position_embeddings": 64})
        assert (parameters.kind, parameters.theta, parameters.number("factor")) == ("linear", 7, 3)


def test_no_rope_in_the_config_is_the_default():
    assert rope.read_parameters({"rope_scaling": None}).kind == "default"
    assert rope.read_parameters({}).theta == 10000.0


@pytest.mark.parametrize(
    ("hf_config", "message"),
    [
        ({"rope_scaling": {"type": "longrope"}}, "'longrope' is not supported; default, linear"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ],
)
def test_what_is_not_supported_is_named(hf_config, message):
    with pytest.raises(ModelLoadError, match=message):
        rope.read_parameters(hf_config)


def test_a_missing_number_is_named():
    parameters = rope.read_parameters({"rope_scaling": {"rope_type": "linear", "factor": None}})
    with pytest.raises(ModelLoadError, match="'linear' needs a number 'factor', got None"):
        rope.frequencies(parameters, 64, 100)
