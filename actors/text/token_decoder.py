"""Token ids to text, one at a time, so that no character is ever split or repeated.

A `TokenDecoder` holds back the bytes of a character that isn't complete. What it has returned, put
together, equals the tokenizer's own decode of all the ids; bytes that are no UTF-8 become U+FFFD.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from .text_tokenizer import TextTokenizer
from .token_bytes import ByteRules, byte_rules

T = TypeVar("T")
_utf8_decoder = codecs.getincrementaldecoder("utf-8")


class TokenDecoder(Protocol):
    def feed(self, token_id: int) -> str:
        """The text that this token completes."""

    def end(self) -> str:
        """What is left of it."""


class TokenDecoders:
    """Opens decoders for the streams of one tokenizer."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer
        self._rules = byte_rules(tokenizer.backend)
        self._bytes = _Memo(self._convert)
        self._tables = {skip: self._table(skip) for skip in (False, True)} if self._rules else {}

    @property
    def by_bytes(self) -> bool:
        """Whether tokens are decoded by their own bytes, not by the library."""
        return self._rules is not None

    def open(self, skip_special_tokens: bool, continues: bool = False) -> TokenDecoder:
        """continues: the tokens go on from a prompt, so a blank that a SentencePiece decoder would
        strip from the beginning of a text belongs to this one. (The library decoder can't know.)
        """
        if not self._tables:
            return LibraryDecoder(self._tokenizer, skip_special_tokens)
        return ByteDecoder(self._tables[skip_special_tokens], continues)

    def bytes_of(self, token_id: int) -> bytes:
        """The bytes of a token by itself, special ones too; none for an unknown id."""
        return self._bytes[token_id]

    def _convert(self, token_id: int) -> bytes:
        if self._rules is None:
            return self._tokenizer.decode([token_id], skip_special_tokens=False).encode()
        token = self._tokenizer.backend.id_to_token(token_id)
        return b"" if token is None else self._rules.convert(token)

    def _table(self, skip_special_tokens: bool) -> _Table:
        assert self._rules is not None
        return _Table(self._tokenizer, self._rules, skip_special_tokens)


class NoTokenDecoders:
    """Stands for TokenDecoders where there is no tokenizer: no token is any text."""

    by_bytes = True

    def open(self, skip_special_tokens: bool, continues: bool = False) -> TokenDecoder:
        return _NoText()

    def bytes_of(self, token_id: int) -> bytes:
        return b""


class _NoText:
    def feed(self, token_id: int) -> str:
        return ""

    def end(self) -> str:
        return ""


class _Memo(dict[int, T], Generic[T]):
    """A table filled as it is asked: vocabularies are large, and texts use little of them."""

    def __init__(self, make: Callable[[int], T]) -> None:
        self._make = make

    def __missing__(self, token_id: int) -> T:
        value = self[token_id] = self._make(token_id)
        return value


class _Table:
    """pieces: text of tokens that are whole characters, bytes of all others."""

    def __init__(
        self, tokenizer: TextTokenizer, rules: ByteRules, skip_special_tokens: bool
    ) -> None:
        backend: Tokenizer = tokenizer.backend
        self.rules = rules
        self._id_to_token = backend.id_to_token
        added = backend.get_added_tokens_decoder().values() if skip_special_tokens else ()
        self._skipped = {token.content for token in added if token.special}
        self.pieces = _Memo(self._piece)

    def token(self, token_id: int) -> str | None:
        """The token as the vocabulary spells it; None for those that are left out of the text."""
        token: str | None = self._id_to_token(token_id)
        return None if token in self._skipped else token

    def _piece(self, token_id: int) -> str | bytes:
        token = self.token(token_id)
        if token is None:
            return ""
        data = self.rules.convert(token)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return data


class ByteDecoder:
    """Decodes by the bytes of each token (token_bytes.py)."""

    __slots__ = ("_at_start", "_num_strip", "_pending", "_pieces", "_table", "_utf8")

    def __init__(self, table: _Table, continues: bool = False) -> None:
        self._table = table
        self._pieces = table.pieces
        self._utf8 = _utf8_decoder("replace")
        self._pending = False
        self._num_strip = 0 if continues else table.rules.num_strip
        self._at_start = not continues and (
            self._num_strip > 0 or table.rules.convert_first is not None
        )

    def feed(self, token_id: int) -> str:
        if self._at_start:
            return self._first(token_id)
        piece = self._pieces[token_id]
        if type(piece) is str and not self._pending:
            return piece
        return self._decode(piece.encode() if isinstance(piece, str) else piece)

    def end(self) -> str:
        text = self._utf8.decode(b"", True)
        return self._stripped(text) if self._at_start else text

    def _decode(self, data: bytes) -> str:
        text = self._utf8.decode(data)
        self._pending = bool(self._utf8.getstate()[0])
        return text

    def _first(self, token_id: int) -> str:
        token = self._table.token(token_id)
        if token is None:
            return ""
        convert_first = self._table.rules.convert_first
        if convert_first is not None:
            self._at_start = False
            return self._decode(convert_first(token))
        return self._stripped(self._decode(self._table.rules.convert(token)))

    def _stripped(self, text: str) -> str:
        strip = self._table.rules.strip
        while self._num_strip and text.startswith(strip):
            text = text.removeprefix(strip)
            self._num_strip -= 1
        self._at_start = not text and self._num_strip > 0
        return text


class LibraryDecoder:
    """Decodes by the library's own stream, for decoders that look at more than one token."""

    def __init__(self, tokenizer: TextTokenizer, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._stream = DecodeStream(skip_special_tokens=skip_special_tokens)
        self._ids: list[int] = []
        self._num_chars = 0

    def feed(self, token_id: int) -> str:
        self._ids.append(token_id)
        text: str = self._stream.step(self._tokenizer.backend, token_id) or ""
        self._num_chars += len(text)
        return text

    def end(self) -> str:
        # The stream has no end of its own: what it holds is what it hasn't said of the whole.
        return self._tokenizer.decode(self._ids, self._skip)[self._num_chars :]
