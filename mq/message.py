"""The base of all wire types."""

from __future__ import annotations

import msgspec


class Message(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """On the wire an array of its fields, in MessagePack."""
