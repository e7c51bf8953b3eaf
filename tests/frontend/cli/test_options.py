"""Every option of every config is on the command line and in the config file."""

from __future__ import annotations

import argparse
import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from msgspec import inspect

from ringcast.frontend.cli.options import add_options, read_options
from ringcast.mq.config import DEFAULT_MODEL, EngineConfig
from ringcast.mq.eplb_config import EplbConfig
from ringcast.mq.errors import ConfigError
from ringcast.mq.server_config import ServerConfig

KINDS = (EngineConfig, ServerConfig)


@functools.cache
def make_parser() -> argparse.ArgumentParser:
    # With a usage of its own: to make that of all options takes most of the time of a parse.
    parser = argparse.ArgumentParser(usage="", exit_on_error=False, allow_abbrev=False)
    for kind in KINDS:
        add_options(parser, kind)
    return parser


def parse(*words: str) -> tuple[EngineConfig, ServerConfig]:
    args = make_parser().parse_intermixed_args(words)
    return read_options(args, EngineConfig), read_options(args, ServerConfig)


def another(field: inspect.Field) -> Any:
    """A value of the field's type that is not its default, found by the type alone."""
    if field.name == "device":
        return "fake"  # what no machine takes by itself
    if field.name == "otlp_traces_endpoint":
        return "http://localhost:4318/v1/traces"
    if field.name == "eplb_config":
        return EplbConfig(step_interval=7)
    kind = field.type
    while isinstance(kind, inspect.Metadata | inspect.UnionType):
        kind = kind.type if isinstance(kind, inspect.Metadata) else kind.types[0]
    if isinstance(kind, inspect.BoolType):
        return not field.default
    if isinstance(kind, inspect.LiteralType):
        return next(value for value in kind.values if value != field.default)
    if isinstance(kind, inspect.ListType):
        return ["first", "second"]
    if isinstance(kind, inspect.StrType):
        return "some text"
    if isinstance(kind, inspect.FloatType):
        return 0.25
    assert isinstance(kind, inspect.IntType)
    return field.default + 1 if isinstance(field.default, int) else 17


def every_field() -> Iterator[tuple[type[msgspec.Struct], str, Any]]:
    for kind in KINDS:
        info = inspect.type_info(kind)
        assert isinstance(info, inspect.StructType)
        for field in info.fields:
            yield kind, field.name, another(field)


# Options that are refused without another one.
NEEDED = {
    "block_size": ["--device", "cpu"],
    "data_parallel_routing": ["--data-parallel-size", "2"],
    "enable_eplb": ["--device", "cpu", "--enable-expert-parallel", "-tp", "2"],
    "eplb_config": ["--device", "cpu", "--enable-expert-parallel", "-tp", "2", "--enable-eplb"],
    "enable_auto_tool_choice": ["--tool-call-parser", "hermes"],
    "enforce_eager": ["--device", "cuda"],
    "gpu_memory_utilization": ["--device", "cuda"],
    "kv_cache_dtype": ["--device", "cuda"],
    "max_long_partial_prefills": ["--long-prefill-token-threshold", "8"],
    "memory_utilization": ["--device", "cpu"],
    "num_threads": ["--device", "cpu"],
    "ssl_keyfile": ["--ssl-certfile", "cert.pem"],
    "ssl_ca_certs": ["--ssl-certfile", "cert.pem"],
    "ssl_cert_reqs": ["--ssl-certfile", "cert.pem", "--ssl-ca-certs", "ca.pem"],
    "allow_credentials": ["--allowed-origins", "https://a.example"],
}


def words_for(name: str, value: Any, space: str) -> list[str]:
    """The command line that gives option `name` this value, with `space` between its words."""
    words = name.split("_")
    if value is False:
        words.insert(0, "no")
    option = "--" + space.join(words)
    if isinstance(value, bool):
        return [option]
    if isinstance(value, msgspec.Struct):
        return [option, msgspec.json.encode(value).decode()]
    return [option, *map(str, value)] if isinstance(value, list) else [option, str(value)]


@pytest.mark.parametrize(("kind", "name", "value"), list(every_field()))
def test_every_option_in_every_spelling(
    kind: type[msgspec.Struct], name: str, value: Any, tmp_path: Path
) -> None:
    place = KINDS.index(kind)  # type: ignore[arg-type]
    assert getattr(parse()[place], name) != value
    file = tmp_path / "options.yaml"
    for space in "-_":
        needed = NEEDED.get(name, [])
        assert getattr(parse(*needed, *words_for(name, value, space))[place], name) == value
        in_file = msgspec.to_builtins(value)
        file.write_text(yaml.safe_dump({name.replace("_", space): in_file}))
        assert getattr(parse(*needed, "--config", str(file))[place], name) == value


def test_defaults_are_the_classes_own() -> None:
    assert parse() == (EngineConfig(), ServerConfig())


# --- the model ------------------------------------------------------------------------------------


def test_model_may_stand_anywhere() -> None:
    assert parse()[0].model == DEFAULT_MODEL
    assert parse("org/name", "--port", "1")[0].model == "org/name"
    assert parse("--port", "1", "org/name")[0].model == "org/name"
    assert parse("--model", "org/name")[0].model == "org/name"
    assert parse("org/name", "--model", "org/name")[0].model == "org/name"
    with pytest.raises(ConfigError, match="two models: 'a/b' and --model 'c/d'"):
        parse("a/b", "--model", "c/d")


def test_command_that_takes_other_arguments() -> None:
    parser = argparse.ArgumentParser()
    add_options(parser, EngineConfig, model_positional=False)
    parser.add_argument("prompt", nargs="+")
    args = parser.parse_args(["one", "two", "--model", "a/b"])
    assert args.prompt == ["one", "two"]
    assert read_options(args, EngineConfig).model == "a/b"


# --- values ---------------------------------------------------------------------------------------


def test_lists_repeat() -> None:
    _, server = parse("--served-model-name", "a", "b", "--served_model_name", "c")
    assert server.served_model_name == ["a", "b", "c"]


def test_the_last_one_counts() -> None:
    engine, _ = parse("--enable-prefix-caching", "--no-enable-prefix-caching", "--seed", "1")
    assert not engine.enable_prefix_caching
    engine, _ = parse("--seed", "1", "--seed", "2")
    assert engine.seed == 2


def test_bounds_are_the_classes_own() -> None:
    with pytest.raises(ConfigError, match="max_num_seqs = 0: Expected `int` >= 1"):
        parse("--max-num-seqs", "0")
    with pytest.raises(ConfigError, match="port = 65536"):
        parse("--port", "65536")


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--dtype", "int3"], "invalid choice: 'int3'"),
        (["--port", "http"], "invalid int value: 'http'"),
        (["--step-timeout", "soon"], "invalid float value: 'soon'"),
    ],
)
def test_values_of_another_type(words: list[str], reason: str) -> None:
    with pytest.raises(argparse.ArgumentError, match=reason):
        parse(*words)


# --- the file -------------------------------------------------------------------------------------


BALANCED = ["--device", "cpu", "--enable-expert-parallel", "-tp", "2", "--enable-eplb"]


def test_a_value_of_several_parts_is_json() -> None:
    engine, _ = parse(*BALANCED, "--eplb-config", '{"window_size": 5, "log_balancedness": true}')
    assert engine.eplb_config == EplbConfig(window_size=5, log_balancedness=True)


@pytest.mark.parametrize(
    ("value", "error", "reason"),
    [
        ("5", argparse.ArgumentError, "'5' is no JSON object: Expected `object`, got `int`"),
        ("{", argparse.ArgumentError, "'{' is no JSON object"),
        ('{"use_async": true}', ConfigError, "unknown field `use_async`"),
        (
            '{"window_size": 0}',
            ConfigError,
            "eplb_config.window_size = 0: Expected `int` >= 1",
        ),
    ],
)
def test_parts_that_are_not(value: str, error: type[Exception], reason: str) -> None:
    with pytest.raises(error, match=re.escape(reason)):
        parse(*BALANCED, "--eplb-config", value)


def test_command_line_beats_file(tmp_path: Path) -> None:
    file = tmp_path / "options.yaml"
    file.write_text("model: org/filed\nmax-num-seqs: 4\nport: 9\nserved_model_name: one\n")
    engine, server = parse("--config", str(file), "--max_num_seqs", "5")
    assert (engine.model, engine.max_num_seqs, server.port) == ("org/filed", 5, 9)
    assert server.served_model_name == ["one"]
    assert parse("org/said", "--config", str(file))[0].model == "org/said"
    assert parse("--model", "org/said", "--config", str(file))[0].model == "org/said"


def test_empty_file(tmp_path: Path) -> None:
    file = tmp_path / "options.yaml"
    file.write_text("# nothing yet\n")
    assert parse("--config", str(file)) == (EngineConfig(), ServerConfig())


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (
            "max-num-sequences: 4",
            "unknown option 'max-num-sequences'; the options are allow_credentials,",
        ),
        ("1: 4", "unknown option 1;"),
        ("seed: 1\nmax-num-seqs: 4\nmax_num_seqs: 5", "max_num_seqs is given twice"),
        ("max_num_seqs: 0", "max_num_seqs = 0: Expected `int` >= 1"),
        ("max_num_seqs: many", "max_num_seqs = 'many': Expected `int`, got `str`"),
        ("- port", "holds no options: it must be lines of `option: value`"),
        ("port", "holds no options"),
        ("port: [", "is no YAML: while parsing"),
        ("!!python/object/apply:os.getcwd []", "is no YAML: could not determine a constructor"),
    ],
)
def test_files_that_mean_nothing(tmp_path: Path, content: str, reason: str) -> None:
    file = tmp_path / "options.yaml"
    file.write_text(content)
    with pytest.raises(ConfigError) as caught:
        parse("--config", str(file))
    assert str(file) in str(caught.value)
    assert reason in str(caught.value)


def test_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"cannot read the config file {tmp_path}/none"):
        parse("--config", f"{tmp_path}/none")
    with pytest.raises(ConfigError, match=rf"cannot read the config file {tmp_path}"):
        parse("--config", str(tmp_path))


# --- help -----------------------------------------------------------------------------------------


def test_help_shows_each_option_once_with_its_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    parser = argparse.ArgumentParser(prog="ringcast serve")
    for kind in KINDS:
        add_options(parser, kind)
    shown = parser.format_help()
    assert shown.startswith("usage: ringcast serve [MODEL] [options]\n")
    assert shown.index("engine options:") < shown.index("server options:")
    for _, name, _ in every_field():
        assert len(re.findall(rf"  --{name.replace('_', '-')}(?![-\w])", shown)) == 1
        assert "_" not in name or f"--{name}" not in shown
    assert "most sequences in one step (default: 128 on cpu and fake, 256 on cuda)" in shown
    assert "share of the device's memory" in shown
    assert "--enable-prefix-caching, --no-enable-prefix-caching" in shown
    assert "(default: true)" in shown
    assert "None" not in shown
