"""An answer of server-sent events that can be written to without a task.

aiohttp's `write` is a coroutine, and to wake a task for each token costs more than all else that
this process does for one, but the system call. So events are `offer`ed: they gather until what came
with them from the engine has been seen to, and go to the transport as one write for each
connection. One step's tokens are one event each then; of a server that lags behind, a write has
those of several steps. Only what a client is too slow for is written by its task, which waits until
there is room.
"""

from __future__ import annotations

import asyncio

from aiohttp import web

_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}


class WriteBatch:
    """The streams of one event loop that have events to be written in its next round."""

    def __init__(self) -> None:
        self._streams: list[EventStream] = []

    def add(self, stream: EventStream) -> None:
        if not self._streams:
            asyncio.get_running_loop().call_soon(self._flush)
        self._streams.append(stream)

    def _flush(self) -> None:
        streams, self._streams = self._streams, []
        for stream in streams:
            stream.flush()


class EventStream:
    """Open it, `offer` or `write`, and `end` it. `response` is what the handler returns."""

    def __init__(self, headers: dict[str, str], batch: WriteBatch) -> None:
        self.response = web.StreamResponse(headers={**_HEADERS, **headers})
        self._batch = batch
        self._events: list[bytes] = []
        self._transport: asyncio.Transport | None = None
        self._chunked = False

    async def open(self, request: web.Request) -> None:
        """Send the headers."""
        await self.response.prepare(request)
        self._transport, self._protocol = request.transport, request.protocol
        self._chunked = "Transfer-Encoding" in self.response.headers  # not for HTTP/1.0

    def offer(self, event: bytes) -> bool:
        """Send an event soon, if there is room and somebody to send it to; otherwise it isn't."""
        events = self._events
        if not events:
            transport = self._transport
            if transport is None or self._protocol.writing_paused or transport.is_closing():
                return False
            self._batch.add(self)
        events.append(event)
        return True

    def flush(self) -> None:
        """Send what was offered. If the client has hung up meanwhile, nobody misses it."""
        events, transport = self._events, self._transport
        if not events:
            return
        data = events[0] if len(events) == 1 else b"".join(events)
        events.clear()
        if transport is not None and not transport.is_closing():
            transport.write(b"%x\r\n%b\r\n" % (len(data), data) if self._chunked else data)

    async def write(self, data: bytes) -> None:
        """Send it after all that was offered, and wait if that is too much for the client.

        Raises ConnectionResetError when it has hung up.
        """
        self.flush()
        await self.response.write(data)

    async def end(self, data: bytes) -> None:
        """Send the last of it, as `write` does."""
        self.flush()
        await self.response.write_eof(data)
