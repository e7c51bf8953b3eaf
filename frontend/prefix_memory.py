"""Which replica has had which beginning of a prompt: what routing by prefix goes by.

A prompt's beginning is named by its blocks of BLOCK_BYTES, as the client has them (text in UTF-8,
token ids, or the JSON of a chat's tools and messages), each by a hash of all up to its end and of
the cache salt. A chat template or a tokenizer may make other blocks of it, and a replica may have
dropped what it had, so this is a guess: it costs a place in the queue when it is wrong, and no
more. Names that were not met for longest are forgotten first, and of one prompt the last ones.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict

import numpy as np
from numpy.typing import NDArray

from ..mq.messages import ChatPrompt, Prompt, TokensPrompt

BLOCK_BYTES = 256  # 64 token ids, or about as many tokens of text
MOST_BLOCKS = 64
MOST_NAMES = 1 << 16
_NAME_BYTES = 8


class PrefixMemory:
    """most: how many names are kept."""

    def __init__(self, num_engines: int, most: int = MOST_NAMES) -> None:
        self._num_engines = num_engines
        self._most = most
        self._engines: OrderedDict[bytes, int] = OrderedDict()  # a bit for each replica

    def __len__(self) -> int:
        return len(self._engines)

    def grow(self, num_engines: int) -> None:
        """There are more replicas, or as many."""
        self._num_engines = num_engines

    def held(self, names: list[bytes]) -> NDArray[np.int64]:
        """By replica, how many of these blocks it has had, from the first on."""
        held = np.zeros(self._num_engines, dtype=np.int64)
        left = (1 << self._num_engines) - 1
        for place, name in enumerate(names):
            stay = left & self._engines.get(name, 0)
            for engine in _bits(left & ~stay) if place else ():
                held[engine] = place
            left = stay
            if not left:
                return held
        for engine in _bits(left) if names else ():
            held[engine] = len(names)
        return held

    def note(self, names: list[bytes], engine: int) -> None:
        """A prompt with these blocks goes to a replica."""
        engines = self._engines
        for name in reversed(names):
            engines[name] = engines.get(name, 0) | 1 << engine
            engines.move_to_end(name)
        while len(engines) > self._most:
            engines.popitem(last=False)

    def forget(self, engine: int) -> None:
        """It has died, and its cache with it."""
        kept = ~(1 << engine)
        for name in [name for name, bits in self._engines.items() if bits >> engine & 1]:
            self._engines[name] &= kept
            if not self._engines[name]:
                del self._engines[name]

    def clear(self) -> None:
        """All caches were reset."""
        self._engines.clear()


def block_names(prompt: Prompt, cache_salt: str = "") -> list[bytes]:
    """Of a prompt's first blocks; none for what is shorter than one."""
    data = _beginning(prompt)
    name = hashlib.blake2b(cache_salt.encode(), digest_size=_NAME_BYTES).digest()
    names = []
    for end in range(BLOCK_BYTES, len(data) + 1, BLOCK_BYTES):
        block = data[end - BLOCK_BYTES : end]
        name = hashlib.blake2b(name + block, digest_size=_NAME_BYTES).digest()
        names.append(name)
    return names


def _beginning(prompt: Prompt) -> bytes:
    most = MOST_BLOCKS * BLOCK_BYTES
    if isinstance(prompt, TokensPrompt):
        return prompt.token_ids[:most]
    if isinstance(prompt, ChatPrompt):
        return (prompt.tools[:most] + prompt.messages[:most])[:most]
    return prompt.text[:most].encode(errors="surrogatepass")[:most]


def _bits(bits: int) -> list[int]:
    places = []
    while bits:
        low = bits & -bits
        places.append(low.bit_length() - 1)
        bits ^= low
    return places
