"""Where Ringcast keeps what it can make again: models and compiled kernels."""

from __future__ import annotations

import os
from pathlib import Path


def cache_root() -> Path:
    """RINGCAST_CACHE, else ringcast in XDG_CACHE_HOME, else ~/.cache/ringcast."""
    own = os.environ.get("RINGCAST_CACHE")
    if own:
        return Path(own).expanduser()
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared) if shared else Path.home() / ".cache") / "ringcast"
