"""What a model's own files say about how it is to be run.

The context length is max_position_embeddings, times the factor of a RoPE scaling that stretches it.
Scaling counts from original_max_position_embeddings where that is given, so that what is scaled
already isn't scaled twice. llama3, longrope and Gemma 3 state the stretched length themselves. A
sliding window doesn't shorten the context.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ...mq.errors import ConfigError, InvalidRequestError, ModelLoadError
from ...mq.sampling_params import SamplingParams
from .folder import read_json

_STRETCHING = ("linear", "dynamic", "yarn")
_SAMPLING = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    """The part of config.json about the language model, which multimodal models nest."""
    nested = config.get("text_config")
    return nested if isinstance(nested, dict) else config


def architecture(folder: Path, config: dict[str, Any]) -> str:
    names = config.get("architectures")
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        raise ModelLoadError(f"{folder / 'config.json'} has no 'architectures'")
    return names[0]


def vocab_size(folder: Path, config: dict[str, Any]) -> int:
    return _positive_int(folder, text_config(config), "vocab_size")


def max_model_len(folder: Path, config: dict[str, Any], asked: int | None) -> int:
    """The context length in tokens. Raises ConfigError for `asked` above the model's own."""
    text = text_config(config)
    if text.get("max_position_embeddings") is None:
        if asked is not None:
            return asked
        raise ModelLoadError(
            f"{folder / 'config.json'} has no max_position_embeddings: give --max-model-len"
        )
    own = _stretched(text, _positive_int(folder, text, "max_position_embeddings"))
    if asked is not None and asked > own:
        raise ConfigError(
            f"max_model_len = {asked}: more than the {own} tokens that the model was made for"
        )
    return own if asked is None else asked


def eos_token_ids(config: dict[str, Any], generation: dict[str, Any], tokenizer: Path) -> list[int]:
    """From generation_config.json, else config.json, else the tokenizer; empty if none has one."""
    for source in (generation, text_config(config), config):
        value = source.get("eos_token_id")
        if value is not None:
            return list(value) if isinstance(value, list) else [value]
    found = _tokenizers_own(tokenizer, "eos_token")
    return [] if found is None else [found]


def bos_token_id(config: dict[str, Any], generation: dict[str, Any], tokenizer: Path) -> int | None:
    for source in (text_config(config), config, generation):
        value = source.get("bos_token_id")
        if isinstance(value, int):
            return value
    return _tokenizers_own(tokenizer, "bos_token")


def sampling_defaults(folder: Path, generation: dict[str, Any]) -> dict[str, Any]:
    """What generation_config.json sets of SamplingParams. As in vLLM, do_sample is not looked at.

    Raises ModelLoadError for what SamplingParams refuses.
    """
    found = {
        ours: generation[theirs]
        for theirs, ours in _SAMPLING.items()
        if generation.get(theirs) is not None
    }
    where = folder / "generation_config.json"
    try:
        SamplingParams(**found)
    except InvalidRequestError as error:
        raise ModelLoadError(f"{where}: {error} (--generation-config none ignores it)") from error
    return found


def chat_template(option: str | None) -> str | None:
    """The template that --chat-template means: the text itself, or the content of a file."""
    if option is None or "{{" in option or "{%" in option:
        return option
    try:
        return Path(option).expanduser().read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"chat_template = {option!r}: neither a jinja template (no '{{{{' or '{{%' in it) "
            f"nor a file that can be read: {error}"
        ) from error


def _stretched(text: dict[str, Any], length: int) -> int:
    if str(text.get("model_type")).startswith("gemma3"):
        return length
    for key in ("rope_scaling", "rope_parameters"):
        scaling = text.get(key)
        if not isinstance(scaling, dict):
            continue
        kind = scaling.get("rope_type", scaling.get("type"))
        factor = scaling.get("factor")
        if kind in _STRETCHING and isinstance(factor, int | float):
            original = scaling.get("original_max_position_embeddings") or length
            return max(int(original * factor), 1)
    return length


def _positive_int(folder: Path, config: dict[str, Any], key: str) -> int:
    value = config.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ModelLoadError(
            f"{folder / 'config.json'}: {key} is {value!r}, not a positive integer"
        )
    return value


def _tokenizers_own(folder: Path, key: str) -> int | None:
    """The id of special token `key`, by tokenizer_config.json and tokenizer.json."""
    token = (read_json(folder / "tokenizer_config.json") or {}).get(key)
    text = token.get("content") if isinstance(token, dict) else token
    if not isinstance(text, str):
        return None
    tokenizer = read_json(folder / "tokenizer.json") or {}
    for added in tokenizer.get("added_tokens", []):
        if added["content"] == text:
            return int(added["id"])
    vocab = tokenizer.get("model", {}).get("vocab")
    return vocab.get(text) if isinstance(vocab, dict) else None
