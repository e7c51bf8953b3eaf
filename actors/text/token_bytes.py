"""Which bytes a token stands for, where the tokenizer's decoder goes token by token.

tokenizer.json describes its decoder as a chain of stages. Three shapes of it give every token bytes
of its own that only need to be put one after the other, and nearly all language models have one of
them:

    ByteLevel           GPT-2, Llama 3, Qwen, SmolLM: a letter of an alphabet for each byte
    Replace* [ByteFallback] [Fuse [Strip]]
                        Llama 2, Mistral, Gemma: "▁" for a blank, <0xE2> for a byte
    Metaspace           "▁" for a blank; the text's first token loses its own

A Strip takes blanks from the beginning of the whole text, so it must come after the Fuse. For any
other chain `byte_rules` returns None, and the tokens are decoded by the library itself
(token_decoder.py).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer

_BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True, slots=True)
class ByteRules:
    """convert: a token's bytes. convert_first: those of a text's first token, where they differ.

    strip, num_strip: up to so many of this character are taken from the beginning of the text.
    """

    convert: Callable[[str], bytes]
    convert_first: Callable[[str], bytes] | None = None
    strip: str = ""
    num_strip: int = 0


def byte_rules(backend: Tokenizer) -> ByteRules | None:
    """The rules of a tokenizer's decoder, or None if it doesn't go token by token."""
    if backend.decoder is None:
        return None
    stages = _flatten(json.loads(backend.decoder.__getstate__()))
    kinds = [stage["type"] for stage in stages if stage["type"] != "Fuse"]
    if kinds == ["ByteLevel"]:
        return ByteRules(_byte_level)
    if kinds == ["Metaspace"]:
        return _metaspace(stages[0] if stages[0]["type"] == "Metaspace" else stages[1])
    return _sentencepiece(stages)


def byte_alphabet() -> dict[str, int]:
    """GPT-2's alphabet: printable bytes stand for themselves, others for letters from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {chr(byte): byte for byte in printable}
    return letters | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_ALPHABET = byte_alphabet()


def _flatten(stage: dict[str, Any]) -> list[dict[str, Any]]:
    if stage["type"] != "Sequence":
        return [stage]
    return [inner for outer in stage["decoders"] for inner in _flatten(outer)]


def _byte_level(token: str) -> bytes:
    try:
        return bytes([_ALPHABET[letter] for letter in token])
    except KeyError:  # an added token that was never spelled in the alphabet
        return token.encode()


def _metaspace(stage: dict[str, Any]) -> ByteRules:
    space = stage["replacement"]
    first = "" if stage["prepend_scheme"] != "never" else " "
    return ByteRules(
        convert=lambda token: token.replace(space, " ").encode(),
        convert_first=lambda token: token.replace(space, first).encode(),
    )


def _sentencepiece(stages: list[dict[str, Any]]) -> ByteRules | None:
    rest = list(stages)
    replacements = []
    while rest and rest[0]["type"] == "Replace" and "String" in rest[0]["pattern"]:
        replacements.append((rest[0]["pattern"]["String"], rest[0]["content"]))
        del rest[0]
    has_bytes = _take(rest, "ByteFallback") is not None
    is_fused = _take(rest, "Fuse") is not None
    strip = _take(rest, "Strip") if is_fused else None
    if rest or not (replacements or has_bytes) or (strip and strip["stop"]):
        return None

    def convert(token: str) -> bytes:
        for pattern, content in replacements:
            token = token.replace(pattern, content)
        if has_bytes and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(match[1], 16)])
        return token.encode()

    if strip is None:
        return ByteRules(convert)
    return ByteRules(convert, strip=strip["content"], num_strip=strip["start"])


def _take(stages: list[dict[str, Any]], kind: str) -> dict[str, Any] | None:
    return stages.pop(0) if stages and stages[0]["type"] == kind else None
