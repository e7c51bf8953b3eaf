"""Where models come from: names, folders, GGUF files, the hub. Nothing here imports torch."""

from .cache import OnProgress
from .catalogue import ModelInfo, list_models, pull
from .resolve import pull_model, resolve_model

__all__ = ["ModelInfo", "OnProgress", "list_models", "pull", "pull_model", "resolve_model"]
