"""What a user calls a model, and the folder it stands for.

In this order: a name of the catalogue, a folder, a .gguf file, a hub id. Whatever is written like a
path is never looked for on the hub.
"""

from __future__ import annotations

import os
from pathlib import Path

from ...mq.errors import ConfigError, ModelLoadError
from . import catalogue, gguf_file, hub_id
from .cache import OnProgress


def find_model(
    model: str, on_progress: OnProgress, *, revision: str | None = None, weights: bool = True
) -> Path:
    """The folder of `model`, fetched and converted where needed.

    weights: whether those of a hub id are fetched too. Raises ModelLoadError where there is no such
    model, ConfigError for a revision of anything but a hub id.
    """
    if not model:
        raise ModelLoadError(_not_found(model))
    path = Path(model).expanduser()
    is_local = model in catalogue.CATALOGUE or path.exists()
    if revision is not None and (is_local or not hub_id.is_hub_id(model)):
        raise ConfigError(f"revision = {revision!r}: only hub ids have revisions, not {model!r}")
    if model in catalogue.CATALOGUE:
        return catalogue.pull(model, on_progress)
    if path.is_dir():
        return path.resolve()
    if path.is_file():
        return gguf_file.model_of(path, on_progress)
    if not _is_written_like_a_path(model) and hub_id.is_hub_id(model):
        return hub_id.fetch(model, revision, weights, on_progress)
    raise ModelLoadError(_not_found(model))


def _is_written_like_a_path(model: str) -> bool:
    return model.startswith((".", "~", os.sep)) or model.endswith((".gguf", os.sep))


def _not_found(model: str) -> str:
    if _is_written_like_a_path(model) or model.count(os.sep) > 1:
        return f"no file or folder {model!r}"
    names = ", ".join(catalogue.CATALOGUE)
    return (
        f"no model {model!r}: a model is a name from `ringcast models` ({names}), a folder, "
        "a .gguf file, or a hub id (org/name)"
    )
