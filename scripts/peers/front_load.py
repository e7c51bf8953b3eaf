"""The users of scripts/bench front: streams over plain sockets, so that they are not the limit.

front_load.py PORT MODEL WORDS. It obeys lines of JSON on stdin, [first, count, tokens]: so many
completions at once, each of so many tokens, on one connection each, which are kept. `first` is the
number of the first of them, for prompts that no other has. It answers each line with one, after
"@@": events in all, and in seconds the times to the first event of each stream and between events.

Responses are not parsed. An event is an occurrence of the bytes it begins with, and a response
has ended with its last chunk; so a user costs about a microsecond for an event.
"""

from __future__ import annotations

import json
import select
import socket
import sys
import time
from itertools import pairwise

OK = b"HTTP/1.1 200"
EVENT = b"data: {"
END = b"data: [DONE]\n\n\r\n0\r\n\r\n"
PATIENCE = 300.0  # seconds without a byte


class User:
    """One connection, with one request after another."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def ask(self, body: bytes) -> None:
        self.times: list[float] = []
        self.counts: list[int] = []
        self._tail = b""
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        self.start = time.perf_counter()
        self.socket.sendall(head + b"Content-Length: %d\r\n\r\n%b" % (len(body), body))

    def hear(self, now: float) -> bool:
        """Take in what has come. Whether the response has ended."""
        data = self.socket.recv(1 << 18)
        if not data:
            raise SystemExit("the server has hung up")
        data = self._tail + data
        if not self.times and data[: len(OK)] != OK[: len(data)]:
            raise SystemExit(f"the server said {data[:300]!r}")
        count = data.count(EVENT)
        if count:
            self.times.append(now)
            self.counts.append(count)
            data = data[data.rindex(EVENT) + len(EVENT) :]
        self._tail = data[-len(END) :] if self.times else data
        return self._tail.endswith(END)

    def gaps(self) -> list[float]:
        """Between events; those that come together have none."""
        gaps = [b - a for a, b in pairwise(self.times)]
        return gaps + [0.0] * (sum(self.counts) - len(self.counts))


def wave(users: list[User], bodies: list[bytes]) -> dict[str, object]:
    """One request of each."""
    poll = select.epoll()
    by_fd = {user.socket.fileno(): user for user in users}
    for fd in by_fd:
        poll.register(fd, select.EPOLLIN)
    for user, body in zip(users, bodies, strict=True):
        user.ask(body)
    num_open = len(users)
    while num_open:
        ready = poll.poll(PATIENCE)
        if not ready:
            raise SystemExit(f"nothing has come for {PATIENCE:g} s")
        now = time.perf_counter()
        for fd, _ in ready:
            num_open -= by_fd[fd].hear(now)
    poll.close()
    return {
        "events": sum(sum(user.counts) for user in users),
        "first": [user.times[0] - user.start for user in users],
        "gaps": [gap for user in users for gap in user.gaps()],
    }


def main() -> None:
    port, model, words = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    users: list[User] = []
    print("@@ready", flush=True)
    for line in sys.stdin:
        first, count, tokens = json.loads(line)
        users += [User(port) for _ in range(count - len(users))]
        bodies = [
            json.dumps(
                {
                    "model": model,
                    "prompt": f"{first + i} " + "word " * words,
                    "max_tokens": tokens,
                    "ignore_eos": True,
                    "stream": True,
                }
            ).encode()
            for i in range(count)
        ]
        print("@@" + json.dumps(wave(users[:count], bodies)), flush=True)


if __name__ == "__main__":
    main()
