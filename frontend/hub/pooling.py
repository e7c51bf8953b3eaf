"""How an embedding model's vectors come about, by its own files as sentence-transformers has them.

modules.json lists what a text goes through: the encoder, a pooling (with a config.json of its own),
and perhaps a normalisation. A folder without it is a bare encoder: its tokens' mean is taken, which
is what sentence-transformers makes of one.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import msgspec

from ...mq.config import EngineConfig, PoolingSpec
from ...mq.errors import ConfigError, ModelLoadError
from . import spec
from .folder import read_json

ENCODERS = ("BertModel",)  # architectures that pool, and generate nothing

Kind = Literal["mean", "cls", "last"]

_MODE = "pooling_mode_"
_KINDS: dict[str, Kind] = {"mean_tokens": "mean", "cls_token": "cls", "lasttoken": "last"}


class _Module(msgspec.Struct):
    type: str
    path: str = ""

    @property
    def name(self) -> str:
        return self.type.rpartition(".")[2]


def pooling_spec(
    folder: Path, architecture: str, hf_config: dict[str, Any], config: EngineConfig
) -> PoolingSpec | None:
    """None for a model that generates.

    Raises ConfigError for options that such a model, or an embedding model, can't have, and
    ModelLoadError for modules that aren't supported.
    """
    asked = config.pooling_type
    if architecture not in ENCODERS:
        if asked != "auto":
            raise ConfigError(
                f"pooling_type = {asked!r}: {architecture} is no embedding model; "
                f"{', '.join(ENCODERS)} is"
            )
        return None
    modules = _modules(folder)
    own = _own_kind(folder, modules) if asked == "auto" else asked
    dimension = hf_config.get("hidden_size")
    if type(dimension) is not int:
        raise ModelLoadError(f"{folder / 'config.json'}: hidden_size is {dimension!r}")
    normalize = any(module.name == "Normalize" for module in modules)
    return PoolingSpec(kind=own, normalize=normalize, dimension=dimension)


def max_model_len(folder: Path, hf_config: dict[str, Any], config: EngineConfig) -> int:
    """The longest prompt in tokens: what sentence-transformers cuts at, if the model says so.

    More can be asked for, up to the encoder's positions. Raises ConfigError where that, or the
    token budget of a step, is too little.
    """
    most = spec.max_model_len(folder, hf_config, config.max_model_len)
    sentences = read_json(folder / "sentence_bert_config.json") or {}
    if sentences.get("do_lower_case"):
        raise ModelLoadError(
            f"{folder / 'sentence_bert_config.json'}: do_lower_case is not supported; the "
            "tokenizer's own normalizer is"
        )
    own = sentences.get("max_seq_length")
    if config.max_model_len is None and type(own) is int and own > 0:
        most = min(most, own)
    if config.max_num_batched_tokens < most:
        raise ConfigError(
            f"max_num_batched_tokens = {config.max_num_batched_tokens}: an embedding model "
            f"computes each prompt in one step, so it must be at least max_model_len, {most}"
        )
    return most


def _modules(folder: Path) -> list[_Module]:
    """Of modules.json, those behind the encoder; none where there is no such file."""
    path = folder / "modules.json"
    if not path.exists():
        return []
    try:
        modules = msgspec.convert(json.loads(path.read_bytes()), list[_Module])
    except (ValueError, OSError) as error:
        raise ModelLoadError(f"cannot read {path}: {error}") from error
    names = [module.name for module in modules]
    if names not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
        raise ModelLoadError(
            f"{path} has the modules {', '.join(names)}; supported are Transformer, Pooling and, "
            "behind them, Normalize"
        )
    return modules[1:]


def _own_kind(folder: Path, modules: list[_Module]) -> Kind:
    if not modules:
        return "mean"
    path = folder / modules[0].path / "config.json"
    config = read_json(path)
    if config is None:
        raise ModelLoadError(f"{path} is missing; modules.json names its folder")
    modes = [
        name.removeprefix(_MODE) for name, on in config.items() if name.startswith(_MODE) and on
    ]
    if len(modes) != 1 or modes[0] not in _KINDS:
        raise ModelLoadError(
            f"{path} asks for the pooling {' and '.join(modes) or 'of nothing'}; supported is one "
            f"of {', '.join(_KINDS)} (--pooling-type takes another)"
        )
    return _KINDS[modes[0]]
