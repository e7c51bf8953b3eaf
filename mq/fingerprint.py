"""Whether two hosts have the same model: a short hash of what its folder says it is.

It covers config.json, the names and sizes of the files of weights, and the index that says which
weights are where. Weights of equal size and other values are not told apart: reading them all would
take as long as loading.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import msgspec

from .config import ModelSpec

_WEIGHTS = ("*.safetensors", "*.gguf")
_INDEX = "*.index.json"


def fingerprint(spec: ModelSpec) -> str:
    """16 hexadecimal digits, the same wherever the model lies and whatever it is called there."""
    folder = Path(spec.path)
    digest = hashlib.blake2b(digest_size=8)
    digest.update(msgspec.json.encode(spec.hf_config, order="deterministic"))
    for path in sorted(path for pattern in _WEIGHTS for path in folder.glob(pattern)):
        digest.update(f"\n{path.name} {path.stat().st_size}".encode())
    for path in sorted(folder.glob(_INDEX)):
        digest.update(path.read_bytes())
    return digest.hexdigest()
