"""From options to a ModelSpec: every file is found, fetched or converted, and nothing is loaded."""

from __future__ import annotations

from pathlib import Path

from ...mq.config import EngineConfig, ModelSpec
from ...mq.errors import ConfigError
from . import pooling, spec
from .cache import OnProgress, ignore_progress
from .find import find_model
from .folder import read_config, read_json, require_tokenizer, require_weights


def resolve_model(config: EngineConfig, on_progress: OnProgress | None = None) -> ModelSpec:
    """The model that `config` names. May download and convert, and blocks as long as that takes.

    on_progress: called with (stage, done, total); total is 0 where it isn't known. A model that is
    in place reports nothing. Raises ConfigError for options that can't work, ModelLoadError for
    files that are missing or damaged.
    """
    _refuse_impossible(config)
    watch = on_progress or ignore_progress
    template = spec.chat_template(config.chat_template)
    needs_weights = config.load_format == "auto" and config.device != "fake"
    folder = find_model(config.model, watch, revision=config.revision, weights=needs_weights)
    hf_config = read_config(folder)
    if needs_weights:
        require_weights(folder)
    tokenizer = folder
    if config.tokenizer is not None:
        tokenizer = find_model(config.tokenizer, watch, weights=False)
    if not config.skip_tokenizer_init:
        require_tokenizer(tokenizer, "--tokenizer takes it from another model")
    generation = read_json(folder / "generation_config.json") or {}
    architecture = spec.architecture(folder, hf_config)
    pooled = pooling.pooling_spec(folder, architecture, hf_config, config)
    if pooled is None:
        longest = spec.max_model_len(folder, hf_config, config.max_model_len)
    else:
        longest = pooling.max_model_len(folder, hf_config, config)
    if pooled is None and longest < 2:
        raise ConfigError(f"max_model_len = {longest}: a prompt of one token leaves no room")
    use_defaults = config.generation_config == "auto"
    return ModelSpec(
        name=config.model,
        path=str(folder),
        tokenizer_path="" if config.skip_tokenizer_init else str(tokenizer),
        architecture=architecture,
        vocab_size=spec.vocab_size(folder, hf_config),
        max_model_len=longest,
        eos_token_ids=spec.eos_token_ids(hf_config, generation, tokenizer),
        hf_config=hf_config,
        bos_token_id=spec.bos_token_id(hf_config, generation, tokenizer),
        chat_template=template,
        sampling_defaults=spec.sampling_defaults(folder, generation) if use_defaults else {},
        pooling=pooled,
    )


def _refuse_impossible(config: EngineConfig) -> None:
    if config.trust_remote_code:
        raise ConfigError(
            "trust_remote_code = True: code from a model's repository is never run here, because "
            "it could do anything that you can; models run by Ringcast's own code alone"
        )
    if config.generation_config not in ("auto", "none"):
        raise ConfigError(
            f"generation_config = {config.generation_config!r}: accepted are 'auto' and 'none'"
        )


def pull_model(
    model: str, revision: str | None = None, on_progress: OnProgress | None = None
) -> Path:
    """Put `model` in place, as `resolve_model` would; returns its folder. Raises as that does."""
    folder = find_model(model, on_progress or ignore_progress, revision=revision)
    read_config(folder)
    require_weights(folder)
    return folder
