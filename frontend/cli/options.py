"""Command-line options made from a config class: the class is the one home of name, type and help.

An option's value comes from the command line, else from the file of --config, else from the class.
Every option may be written with dashes or with underscores, in both places.
"""

from __future__ import annotations

import argparse
import functools
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import yaml  # type: ignore[import-untyped]
from msgspec import inspect

from ...mq.cluster_config import ClusterConfig
from ...mq.config import EngineConfig, build
from ...mq.devices import explain_default
from ...mq.errors import ConfigError
from ...mq.server_config import ServerConfig

T = TypeVar("T", bound=msgspec.Struct)

_TITLES: dict[type, str] = {
    EngineConfig: "engine",
    ServerConfig: "server",
    ClusterConfig: "several hosts",
}
_SCALARS: dict[type, tuple[type, str]] = {
    inspect.IntType: (int, "N"),
    inspect.FloatType: (float, "X"),
    inspect.StrType: (str, "TEXT"),
}


def add_options(
    parser: argparse.ArgumentParser, kind: type[msgspec.Struct], *, model_positional: bool = True
) -> None:
    """Give `parser` an option for every field of `kind`, and once --config FILE, for all of them.

    model_positional: where `kind` has a `model`, it may also be given as the argument MODEL.
    """
    kinds = parser.get_default("option_kinds") or ()
    parser.set_defaults(option_kinds=(*kinds, kind))
    if not kinds:
        parser.add_argument(
            "--config", metavar="FILE", dest="config_file", help="a YAML file of options by name"
        )
    title = _TITLES.get(kind, kind.__name__)
    group = parser.add_argument_group(f"{title} options")
    for field in _fields(kind):
        _add_option(group, field)
        if field.name == "model" and model_positional:
            parser.usage = "%(prog)s [MODEL] [options]"
            parser.add_argument(
                "model_argument", metavar="MODEL", nargs="?", help=f"{_help(field)}; or --model"
            )


def read_options(args: argparse.Namespace, kind: type[T]) -> T:
    """The config of `kind` that the command line and its --config file ask for.

    Raises ConfigError that names the option at fault, and the file if it is in there.
    """
    in_file, given = _given(args, kind)
    try:
        return build(kind, {**in_file, **given})
    except ConfigError:
        _check_file(args, in_file, kind)
        raise


def given_options(args: argparse.Namespace, kind: type[msgspec.Struct]) -> dict[str, Any]:
    """What the command line and its --config file say of `kind`, without any default."""
    in_file, given = _given(args, kind)
    return {**in_file, **given}


def _given(
    args: argparse.Namespace, kind: type[msgspec.Struct]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """(in the --config file, on the command line)"""
    names = {field.name for field in _fields(kind)}
    in_file = {k: v for k, v in _read_file(args).items() if k in names}
    given = {k: v for k, v in vars(args).items() if k in names}
    argument = getattr(args, "model_argument", None) if "model" in names else None
    if argument is not None:
        if given.get("model", argument) != argument:
            raise ConfigError(f"two models: {argument!r} and --model {given['model']!r}")
        given["model"] = argument
    return in_file, given


def _check_file(args: argparse.Namespace, options: dict[str, Any], kind: type[T]) -> None:
    """Raise the ConfigError of a file that is at fault by itself."""
    if options:
        try:
            build(kind, options)
        except ConfigError as error:
            raise ConfigError(f"{args.config_file}: {error}") from None


@functools.cache
def _fields(kind: type[msgspec.Struct]) -> tuple[inspect.Field, ...]:
    info = inspect.type_info(kind)
    assert isinstance(info, inspect.StructType)
    return info.fields


def _add_option(group: Any, field: inspect.Field) -> None:
    dashed, underscored = "--" + field.name.replace("_", "-"), "--" + field.name
    kind = _plain_type(field.type)
    same: dict[str, Any] = {"dest": field.name, "default": argparse.SUPPRESS}
    if isinstance(kind, inspect.BoolType):
        group.add_argument(dashed, **same, action=argparse.BooleanOptionalAction, help=_help(field))
        if underscored != dashed:
            hidden = {**same, "help": argparse.SUPPRESS}
            group.add_argument(underscored, **hidden, action="store_true")
            group.add_argument(f"--no_{field.name}", **hidden, action="store_false")
        return
    same |= _value(kind)
    group.add_argument(dashed, *_short(field), **same, help=_help(field))
    if underscored != dashed:
        group.add_argument(underscored, **same, help=argparse.SUPPRESS)


def _short(field: inspect.Field) -> tuple[str, ...]:
    """The short form, where the option has one."""
    assert isinstance(field.type, inspect.Metadata)
    extra = field.type.extra or {}
    return (extra["short"],) if "short" in extra else ()


def _value(kind: inspect.Type) -> dict[str, Any]:
    """argparse's description of a value that isn't a bool."""
    if isinstance(kind, inspect.LiteralType):
        return {"choices": kind.values}
    if isinstance(kind, inspect.ListType):
        return {**_value(_plain_type(kind.item_type)), "nargs": "+", "action": "extend"}
    if isinstance(kind, inspect.StructType):
        return {"type": _json_object, "metavar": "JSON"}
    convert, metavar = _SCALARS[type(kind)]
    return {"type": convert, "metavar": metavar}


def _json_object(text: str) -> dict[str, Any]:
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.MsgspecError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no JSON object: {error}") from None


def _plain_type(kind: inspect.Type) -> inspect.Type:
    """The type inside Annotated and Optional."""
    if isinstance(kind, inspect.Metadata):
        return _plain_type(kind.type)
    if isinstance(kind, inspect.UnionType):
        (inner,) = (t for t in kind.types if not isinstance(t, inspect.NoneType))
        return _plain_type(inner)
    return kind


def _help(field: inspect.Field) -> str:
    assert isinstance(field.type, inspect.Metadata)
    text = str((field.type.extra_json_schema or {})["description"])
    default = explain_default(field.name) or field.default
    if default not in (msgspec.NODEFAULT, None):
        default = str(default).lower() if isinstance(default, bool) else default
        if isinstance(default, msgspec.Struct):
            default = msgspec.json.encode(default).decode()
        text += f" (default: {default})"
    return text.replace("%", "%%")


def _read_file(args: argparse.Namespace) -> dict[str, Any]:
    """The options in the file of --config, by field name."""
    path = getattr(args, "config_file", None)
    if path is None:
        return {}
    fields = {field.name: field for kind in args.option_kinds for field in _fields(kind)}
    options: dict[str, Any] = {}
    for key, value in _load_yaml(path).items():
        name = str(key).replace("-", "_")
        if name not in fields:
            known = ", ".join(sorted(fields))
            raise ConfigError(f"{path}: unknown option {key!r}; the options are {known}")
        if name in options:
            raise ConfigError(f"{path}: {name} is given twice")
        is_list = isinstance(_plain_type(fields[name].type), inspect.ListType)
        options[name] = [value] if is_list and not isinstance(value, list) else value
    return options


def _load_yaml(path: str) -> dict[Any, Any]:
    try:
        content = yaml.safe_load(Path(path).expanduser().read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the config file {path}: {error}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is no YAML: {' '.join(str(error).split())}") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"{path} holds no options: it must be lines of `option: value`")
    return content
