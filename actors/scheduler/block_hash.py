"""Names for the content of full KV blocks.

What a block's keys and values are depends on its tokens and on all tokens before it, so its name is
a hash chain:

    hash[i] = digest(hash[i - 1] + token ids of block i as i32 + extra keys)

with zero bytes before the first block. The first two parts have fixed lengths, so no two inputs run
together. Extra keys are what else must be equal for a block to be shared. A request's cache salt is
one of the first block, and the chain hands it on to all others. A block that isn't full has no
name: it may still be written.

    algorithm   bits   finding two prompts of one name on purpose is
    blake2b     128    out of reach
    sha256      256    out of reach, as standards bodies want it said
    xxh3_128    128    possible: it is no cryptographic hash. For users who trust each other
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from functools import partial
from hashlib import blake2b, sha256

from ...mq.errors import ConfigError
from .packed import packed

Digest = Callable[[bytes], bytes]


class BlockHasher:
    """Raises ConfigError if the algorithm's package isn't installed."""

    def __init__(self, algorithm: str, block_size: int) -> None:
        self.digest = _DIGESTS[algorithm]()
        self.root = bytes(len(self.digest(b"")))
        self._block_size = block_size

    def extend(
        self, hashes: list[bytes], tokens: Sequence[int], num_blocks: int, salt: bytes
    ) -> None:
        """Hash on until `hashes` names the first `num_blocks` blocks of `tokens`, all full."""
        digest, size = self.digest, self._block_size
        for i in range(len(hashes), num_blocks):
            content = packed(tokens[i * size : (i + 1) * size])
            hashes.append(digest(hashes[-1] + content if i else self.root + content + salt))


def _blake2b() -> Digest:
    make = partial(blake2b, digest_size=16)
    return lambda data: make(data).digest()


def _sha256() -> Digest:
    return lambda data: sha256(data).digest()


def _xxh3_128() -> Digest:
    try:
        digest: Digest = importlib.import_module("xxhash").xxh3_128_digest
    except ImportError:
        raise ConfigError(
            "prefix_caching_hash_algo = 'xxh3_128' needs the package xxhash: install it, or take "
            "blake2b or sha256"
        ) from None
    return digest


_DIGESTS: dict[str, Callable[[], Digest]] = {
    "blake2b": _blake2b,
    "sha256": _sha256,
    "xxh3_128": _xxh3_128,
}
