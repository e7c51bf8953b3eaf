"""A model of the Hugging Face hub, by its id "org/name"."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from ...mq.errors import ModelLoadError
from .cache import OnProgress

_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[\w.-]{1,96}")
_DESCRIBING = ["*.json", "*.jinja", "tokenizer.model"]
_WEIGHTS = ["*.safetensors"]
_NOT_OURS = ["*/*", "consolidated*.safetensors"]  # other formats' folders; the same weights again


def is_hub_id(text: str) -> bool:
    """Whether `text` has the form of a hub id."""
    return _ID.fullmatch(text) is not None


def fetch(model: str, revision: str | None, weights: bool, on_progress: OnProgress) -> Path:
    """The folder of `model` in Hugging Face's own cache, downloaded where needed.

    Raises ModelLoadError for a name or revision that doesn't exist or needs a login, and where
    there is neither network nor a copy in that cache.
    """
    from huggingface_hub import errors, snapshot_download

    wanted = f"{model!r}" + (f" at revision {revision!r}" if revision else "")
    on_progress("download", 0, 0)
    try:
        folder = snapshot_download(
            model,
            revision=revision,
            allow_patterns=_DESCRIBING + (_WEIGHTS if weights else []),
            ignore_patterns=_NOT_OURS,
            tqdm_class=_reporter(on_progress),
        )
    except errors.GatedRepoError as error:
        raise ModelLoadError(
            f"the hub gives {wanted} only to those who accepted its terms: accept them on its page "
            "and log in with `hf auth login`"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise ModelLoadError(
            f"the hub has {model!r}, but no revision {revision!r} of it"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise ModelLoadError(
            f"no model {wanted} on the hub (or it is private: log in with `hf auth login`)"
        ) from error
    except Exception as error:  # of whichever HTTP library this version of huggingface_hub uses
        raise ModelLoadError(
            f"cannot fetch {wanted} from the hub: {_first_line(error)}. It takes a network, or a "
            "copy in its cache; a folder or a .gguf file needs neither"
        ) from error
    return Path(folder)


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return (lines[0] if lines else type(error).__name__).removeprefix("Got: ").rstrip(".")


def _reporter(on_progress: OnProgress) -> Any:
    """A tqdm class that shows nothing and reports the bytes of all files together."""
    from tqdm.auto import tqdm  # type: ignore[import-untyped]

    most = 0

    class Reporter(tqdm):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self.counts_bytes = kwargs.get("unit") == "B"
            super().__init__(*args, **{**kwargs, "disable": True})

        def update(self, n: float | None = 1) -> None:
            nonlocal most
            self.n += n or 0
            if self.counts_bytes and self.n > most:  # there may be a second bar that lags behind
                most = int(self.n)
                on_progress("download", most, int(self.total or 0))

    return Reporter
