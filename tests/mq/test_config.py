"""Options: each has a default that is accepted and a line of help; mistakes name the option."""

from __future__ import annotations

import msgspec
import pytest
from msgspec import inspect

from ringcast.mq.config import EngineConfig, build
from ringcast.mq.eplb_config import EplbConfig
from ringcast.mq.errors import ConfigError
from ringcast.mq.server_config import ServerConfig

KINDS = [EngineConfig, ServerConfig]


@pytest.mark.parametrize("kind", KINDS)
def test_no_options_are_the_defaults(kind):
    assert build(kind, {}) == kind()


@pytest.mark.parametrize("kind", KINDS)
def test_every_default_is_within_its_own_bounds(kind):
    assert build(kind, msgspec.structs.asdict(kind())) == kind()


@pytest.mark.parametrize("kind", KINDS)
def test_every_option_has_a_line_of_help(kind):
    for field in inspect.type_info(kind).fields:
        described = field.type
        assert isinstance(described, inspect.Metadata), field.name
        assert described.extra_json_schema["description"], field.name


def test_options_are_taken():
    options = {
        "model": "tiny",
        "block_size": 32,
        "max_model_len": None,
        "skip_tokenizer_init": True,
    }
    config = build(EngineConfig, options)
    assert config.skip_tokenizer_init
    assert (config.model, config.block_size, config.max_model_len) == ("tiny", 32, None)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("block_size", 0),
        ("block_size", 257),
        ("block_size", "16"),
        ("max_num_seqs", 0),
        ("max_num_batched_tokens", 0),
        ("max_model_len", 0),
        ("long_prefill_token_threshold", -1),
        ("max_steps_in_flight", 0),
        ("num_gpu_blocks_override", 1),
        ("kv_cache_memory_bytes", 0),
        ("memory_utilization", 0.0),
        ("memory_utilization", 1.5),
        ("gpu_memory_utilization", 0.0),
        ("gpu_memory_utilization", 1.01),
        ("num_threads", 0),
        ("max_num_queued_reqs", 0),
        ("ring_bytes", 65535),
        ("step_timeout", 0),
        ("startup_timeout", 0),
        ("shutdown_timeout", -1),
        ("dtype", "float8"),
        ("transport", "pipe"),
        ("device", "abacus"),
        ("load_format", "pickle"),
        ("enable_prefix_caching", "yes"),
        ("enforce_eager", 1),
        ("skip_tokenizer_init", "no"),
        ("model", 3),
    ],
)
def test_a_value_out_of_bounds_names_the_option_and_the_value(option, value):
    with pytest.raises(ConfigError) as caught:
        build(EngineConfig, {option: value})
    assert str(caught.value).startswith(f"{option} = {value!r}: ")
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize("option", ["tokenizer", "chat_template"])
def test_without_a_tokenizer_nothing_is_said_of_one(option):
    with pytest.raises(ConfigError, match=f"^{option} = 'x': of no use with skip_tokenizer_init"):
        build(EngineConfig, {option: "x", "skip_tokenizer_init": True})


@pytest.mark.parametrize(
    ("option", "value"), [("port", 65536), ("port", -1), ("max_body_bytes", 1)]
)
def test_server_options_have_bounds(option, value):
    with pytest.raises(ConfigError, match=f"^{option} = {value}: "):
        build(ServerConfig, {option: value})


def test_auto_tool_choice_needs_a_parser():
    with pytest.raises(ConfigError, match="enable_auto_tool_choice = True: needs tool_call_parser"):
        build(ServerConfig, {"enable_auto_tool_choice": True})
    build(ServerConfig, {"enable_auto_tool_choice": True, "tool_call_parser": "hermes"})
    with pytest.raises(ConfigError, match="tool_call_parser = 'own'"):
        build(ServerConfig, {"tool_call_parser": "own"})


def test_a_fault_inside_a_list_names_the_option():
    with pytest.raises(ConfigError, match=r"^served_model_name = "):
        build(ServerConfig, {"served_model_name": ["a", 1]})


def test_an_unknown_option_names_itself_and_the_known_ones():
    with pytest.raises(ConfigError, match="unknown option 'tensor_cores'") as caught:
        build(EngineConfig, {"tensor_cores": 1})
    assert "block_size" in str(caught.value)


DEALT = {"device": "cpu", "enable_expert_parallel": True, "tensor_parallel_size": 2}


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (
            {"device": "cpu", "enable_eplb": True},
            "enable_eplb = True: needs enable_expert_parallel",
        ),
        ({**DEALT, "eplb_config": {"window_size": 5}}, "eplb_config = .*=5.*: needs enable_eplb"),
        ({**DEALT, "enable_eplb": True, "deterministic": True}, "deterministic it must be False"),
        ({**DEALT, "enable_eplb": True, "pipeline_parallel_size": 2}, "pipeline_parallel_size = 2"),
        (
            {**DEALT, "enable_eplb": True, "eplb_config": {"step_interval": 0}},
            "^eplb_config.step_interval = 0: Expected `int` >= 1",
        ),
    ],
)
def test_what_cannot_be_balanced_is_refused(options, reason):
    with pytest.raises(ConfigError, match=reason):
        build(EngineConfig, options)


def test_the_balancers_options_may_be_of_any_kind():
    by_name = build(EngineConfig, {**DEALT, "enable_eplb": True, "eplb_config": {"window_size": 5}})
    own = EplbConfig(window_size=5)
    made = build(EngineConfig, {**DEALT, "enable_eplb": True, "eplb_config": own})
    assert made == by_name
