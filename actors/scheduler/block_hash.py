"""Names for the content of full KV blocks.

What a block's keys and values are depends on its tokens and on all tokens before it, so its name is
a hash chain:

    hash[i] = blake2b(hash[i - 1] + token ids of block i as i32 + extra keys)

with 16 zero bytes before the first block. The first two parts have fixed lengths, so no two inputs
run together. Extra keys are what else must be equal for a block to be shared. A request's cache
salt is one of the first block, and the chain hands it on to all others. 128 bits: nobody finds two
prompts of one name, by chance or on purpose.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

from .packed import packed

HASH_BYTES = 16
ROOT = bytes(HASH_BYTES)


def block_hash(parent: bytes, token_ids: bytes, extra: bytes = b"") -> bytes:
    """The name of the block with these tokens (i32[block_size]) behind the block named `parent`."""
    return blake2b(parent + token_ids + extra, digest_size=HASH_BYTES).digest()


def extend(
    hashes: list[bytes], tokens: Sequence[int], num_blocks: int, block_size: int, salt: bytes
) -> None:
    """Hash on until `hashes` names the first `num_blocks` blocks of `tokens`."""
    for i in range(len(hashes), num_blocks):
        content = packed(tokens[i * block_size : (i + 1) * block_size])
        hashes.append(block_hash(hashes[-1] if i else ROOT, content, b"" if i else salt))
