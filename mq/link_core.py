"""One link between two hosts, without its socket: frames in, frames out.

Either side of a link has one of these, from the moment the master has welcomed the node until
either of them is lost. A frame is

    kind u8, epoch u32, number u64 | body          little-endian

    kind     | body
    ---------|------------------------------------------------------------------------
    RECORD   | length u8, the edge's name, the record: see `record`
    MESSAGE  | a message of LinkMessage (handshake.py), in order with the records
    BEAT     | u64: how many bytes of records this side has handed on

1. The epoch names this link among all between the same two; the number counts one side's frames. So
   what doesn't follow the frame before it, be it late, lost or twice there, ends the link.
2. At most `window` bytes of records are on their way and not handed on: more wait here, and `full`
   says so until they have left. A record larger than that goes when nothing else is on its way. So
   memory is bounded on both sides by what one side puts in while it is full, plus the window.
3. A beat goes out at every tick, and whenever half a window has been handed on. A side that has
   heard nothing for so many ticks in a row gives the other up. Time is counted in ticks, so that a
   suspended machine accuses nobody.
"""

from __future__ import annotations

import struct
from collections import deque
from typing import Any

import msgspec

from . import codec
from .errors import ChannelTimeout, CorruptRecordError
from .handshake import LinkMessage
from .message import Message

TICK_SECONDS = 1.0
SILENT_TICKS = 5
WINDOW = 4 << 20

RECORD, MESSAGE, BEAT = 1, 2, 3
_HEAD = struct.Struct("<BIQ")
_COUNT = struct.Struct("<Q")


class Record(msgspec.Struct, frozen=True, gc=False):
    """A record that travels on this edge of the process graph (actors/topology.py)."""

    edge: str
    payload: bytes


class LinkCore:
    """other: who is at the other end, for errors. Raises ChannelTimeout when it is silent, and
    CorruptRecordError at a frame that isn't the next one of this link."""

    def __init__(self, epoch: int, other: str, window: int = WINDOW) -> None:
        self.other = other
        self._epoch = epoch
        self._window = window
        self._num_sent = self._num_heard = 0
        self._waiting: deque[tuple[int, bytes, int]] = deque()  # kind, body, bytes that count
        self._sent_bytes = self._taken_bytes = 0  # of records: ours; ours that they handed on
        self._handed_on = self._told = 0  # of theirs: handed on by us; what they know of it
        self._silent_ticks = 0
        self._decode: codec.Decoder[Any] = codec.Decoder(LinkMessage)

    @property
    def full(self) -> bool:
        """Whether something waits for the window: put nothing more in for now."""
        return bool(self._waiting)

    @property
    def under_way(self) -> int:
        """Bytes of our records that the other side has not handed on yet."""
        return self._sent_bytes - self._taken_bytes

    def record(self, edge: str, payload: bytes) -> list[bytes]:
        """Put in one record of `edge`. The frames that may go now."""
        name = edge.encode()
        body = bytes((len(name),)) + name + payload
        self._waiting.append((RECORD, body, len(body)))
        return self._release()

    def message(self, message: Message) -> list[bytes]:
        """Put in one message, which comes after all that was put in before it."""
        self._waiting.append((MESSAGE, codec.encode(message), 0))
        return self._release()

    def heard(self, frame: bytes) -> tuple[Record | Message | None, list[bytes]]:
        """Take in one frame: what it brought, and the frames that may go now."""
        kind, body = self._open(frame)
        self._silent_ticks = 0
        if kind == RECORD:
            end = 1 + body[0]
            return Record(body[1:end].decode(), body[end:]), []
        if kind == MESSAGE:
            message: Message = self._decode(body)
            return message, []
        (self._taken_bytes,) = _COUNT.unpack(body)
        return None, self._release()

    def handed_on(self, record: Record) -> list[bytes]:
        """A record that was heard needs no memory here any more. The frames that may go now."""
        self._handed_on += 1 + len(record.edge.encode()) + len(record.payload)
        if self._handed_on - self._told >= self._window // 2:
            return [self._beat()]
        return []

    def tick(self) -> list[bytes]:
        """A tick has passed, and all that has arrived was heard."""
        if self._silent_ticks >= SILENT_TICKS:
            seconds = self._silent_ticks * TICK_SECONDS
            raise ChannelTimeout(f"{self.other} went silent: nothing heard for {seconds:g} s")
        self._silent_ticks += 1
        return [self._beat()]

    def probe(self) -> bytes:
        """A frame that may go at any time."""
        return self._beat()

    def _open(self, frame: bytes) -> tuple[int, bytes]:
        if len(frame) < _HEAD.size:
            raise CorruptRecordError(f"{self.other}: {len(frame)} bytes are no frame of a link")
        kind, epoch, number = _HEAD.unpack_from(frame)
        expected = self._num_heard
        if (epoch, number) != (self._epoch, expected) or kind not in (RECORD, MESSAGE, BEAT):
            raise CorruptRecordError(
                f"{self.other}: frame {number} (kind {kind}) of link {epoch} came where frame "
                f"{expected} of link {self._epoch} was expected"
            )
        self._num_heard += 1
        return kind, frame[_HEAD.size :]

    def _release(self) -> list[bytes]:
        frames = []
        while self._waiting:
            kind, body, size = self._waiting[0]
            if size and self.under_way and self.under_way + size > self._window:
                break
            self._waiting.popleft()
            self._sent_bytes += size
            frames.append(self._frame(kind, body))
        return frames

    def _beat(self) -> bytes:
        self._told = self._handed_on
        return self._frame(BEAT, _COUNT.pack(self._handed_on))

    def _frame(self, kind: int, body: bytes) -> bytes:
        number, self._num_sent = self._num_sent, self._num_sent + 1
        return _HEAD.pack(kind, self._epoch, number) + body
