"""Messages to bytes and back: MessagePack by msgspec, arrays as raw bytes. Never pickle."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Generic, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from .errors import CorruptRecordError

T = TypeVar("T")
_encoder = msgspec.msgpack.Encoder()
encode = _encoder.encode


class Decoder(Generic[T]):
    """Decodes one edge's union of message types. Raises CorruptRecordError on anything else."""

    def __init__(self, types: Any) -> None:
        self._decode = msgspec.msgpack.Decoder(types).decode

    def __call__(self, payload: bytes | memoryview) -> T:
        try:
            message: T = self._decode(payload)
        except msgspec.DecodeError as error:
            raise CorruptRecordError(
                f"{len(payload)} bytes are no message of this edge: {error}"
            ) from error
        return message


def pack(values: Iterable[int] | NDArray[Any]) -> bytes:
    """int32 array as bytes. Raises OverflowError for values outside int32."""
    array = values if isinstance(values, np.ndarray) else np.array(list(values), dtype=np.int64)
    if array.dtype != np.int32:
        if array.size and (array.min() < -(2**31) or array.max() >= 2**31):
            raise OverflowError("a value does not fit in 32 bits")
        array = array.astype(np.int32)
    return array.tobytes()


def ints(data: bytes) -> NDArray[np.int32]:
    """A read-only int32 view of `data`, shape [N]."""
    return np.frombuffer(data, dtype=np.int32)


def longs(data: bytes) -> NDArray[np.int64]:
    """A read-only int64 view of `data`, shape [N]."""
    return np.frombuffer(data, dtype=np.int64)


def floats(data: bytes) -> NDArray[np.float32]:
    """A read-only float32 view of `data`, shape [N]."""
    return np.frombuffer(data, dtype=np.float32)
