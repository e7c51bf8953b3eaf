"""The users of scripts/bench faults: so many streams at once, each followed by another.

fault_load.py STREAMS SEED [FOLDER]: with the folder of a counting model every text is compared with
what the fake device must say; without, only the number of tokens is. Prompts, lengths, choices and
stop strings vary with the seed. It obeys lines of JSON on stdin and answers each with one, after
"@@":

    {"do": "url", "url": U}                    requests go there from now on
    {"do": "mark"}                             forget when tokens came, but the last of each stream
    {"do": "wait", "after": T, "timeout": S}   until every stream has had a token after T
    {"do": "breaks", "expected": E}            what may end streams: "", "connections", "anything"
    {"do": "stop"}                             hang up on all
    {"do": "counts"}

Times are time.monotonic(). A slot holds one stream after another; the tokens of a slot are those of
all of its streams.
"""

from __future__ import annotations

import asyncio
import bisect
import json
import random
import sys
import time
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
from counting_model import word
from figures import lost_and_repeated
from tokenizers import Tokenizer

from ringcast.executor.fake_runner import expected_tokens
from ringcast.frontend.hub import resolve_model
from ringcast.mq.config import EngineConfig

RETRY = 0.05  # seconds
KEPT_REASONS = 5
NEVER_FOUND = "3 X"  # as a stop string: makes the detokenizer hold a letter back now and then


@dataclass
class Counts:
    """finished: requests that ended as they should. failed: that didn't, with some of the reasons.
    broken: whose answer broke off when that was expected. lost, repeated: tokens.
    """

    finished: int = 0
    failed: int = 0
    broken: int = 0
    lost: int = 0
    repeated: int = 0
    reasons: list[str] = field(default_factory=list)


class Expectation:
    """What the fake device must say."""

    def __init__(self, folder: Path) -> None:
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._spec = resolve_model(
            EngineConfig(model=str(folder), device="fake", load_format="dummy")
        )

    def words(self, prompt: str, choice: int, count: int) -> list[str]:
        ids = self._tokenizer.encode(prompt).ids
        return [word(token) for token in expected_tokens(ids, choice, count, self._spec)]


class Stream:
    """One request, as its user sees it."""

    def __init__(self, rng: random.Random, slot: int, number: int, exact: bool) -> None:
        self.prompt = f"{slot} and {number}: " + "".join(
            rng.choices("abcdefgh ", k=rng.randrange(8, 80))
        )
        self.num_choices = 2 if exact and number % 4 == 3 else 1
        self.num_tokens = rng.randrange(100, 500) if exact else rng.randrange(60, 200)
        self.body = {
            "prompt": self.prompt,
            "max_tokens": self.num_tokens,
            "n": self.num_choices,
            "seed": number,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if exact and number % 3 == 2:
            self.body["stop"] = NEVER_FOUND
        self.texts = [""] * self.num_choices
        self.num_counted = 0
        self.done = False
        self._rest = b""

    def feed(self, data: bytes) -> bool:
        """More of the response. Whether it brought a token. Raises StreamError."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        token = False
        for line in lines:
            if line == b"data: [DONE]":
                self.done = True
            elif line:
                event = msgspec.json.decode(line.removeprefix(b"data: "))
                if "error" in event:
                    raise StreamError(f"error: {event['error'].get('message')}")
                if usage := event.get("usage"):
                    self.num_counted = usage["completion_tokens"]
                for choice in event["choices"]:
                    self.texts[choice["index"]] += choice["text"]
                    token = token or bool(choice["text"])
        return token


class StreamError(Exception):
    """A stream that ends otherwise than it should."""


class Load:
    def __init__(self, streams: int, seed: int, folder: Path | None) -> None:
        self._seed = seed
        self._expectation = Expectation(folder) if folder is not None else None
        self._arrivals: list[list[float]] = [[] for _ in range(streams)]
        self._breaks_expected = ""
        self._url = ""
        self._tasks: list[asyncio.Task[None]] = []
        self.counts = Counts()

    async def obey(self, command: dict[str, Any]) -> dict[str, Any]:
        match command["do"]:
            case "url":
                self._url = command["url"]
                if not self._tasks:
                    slots = range(len(self._arrivals))
                    self._tasks = [asyncio.create_task(self._keep_busy(slot)) for slot in slots]
            case "mark":
                self._arrivals = [times[-1:] for times in self._arrivals]
            case "wait":
                return await self._wait(command["after"], command["timeout"])
            case "breaks":
                self._breaks_expected = command["expected"]
            case "stop":
                for task in self._tasks:
                    task.cancel()
                await asyncio.gather(*self._tasks, return_exceptions=True)
                self._tasks = []
            case "counts":
                return asdict(self.counts)
        return {}

    async def _wait(self, after: float, timeout: float) -> dict[str, Any]:
        """last: when the last slot had its first token after `after`. pauses: each slot's longest
        time without a token since the mark.
        """
        deadline = time.monotonic() + timeout
        while True:
            firsts = [self._first_after(times, after) for times in self._arrivals]
            silent = [slot for slot, first in enumerate(firsts) if first is None]
            if not silent or time.monotonic() > deadline:
                break
            await asyncio.sleep(0.005)
        pauses = [max((b - a for a, b in pairwise(times)), default=0.0) for times in self._arrivals]
        last = max((first for first in firsts if first is not None), default=0.0)
        return {"last": last, "silent": silent, "pauses": pauses}

    def _first_after(self, times: list[float], after: float) -> float | None:
        place = bisect.bisect_right(times, after)
        return times[place] if place < len(times) else None

    async def _keep_busy(self, slot: int) -> None:
        number = 0
        connector = aiohttp.TCPConnector(force_close=True)
        async with aiohttp.ClientSession(connector=connector) as session:
            while True:
                number += 1
                rng = random.Random(f"{self._seed}/{slot}/{number}")
                stream = Stream(rng, slot, number, self._expectation is not None)
                await self._follow(session, slot, stream)
                self._compare(stream)
                if not stream.done:
                    await asyncio.sleep(RETRY)

    async def _follow(self, session: aiohttp.ClientSession, slot: int, stream: Stream) -> None:
        counts = self.counts
        try:
            url = f"{self._url}/v1/completions"
            async with session.post(url, json=stream.body) as response:
                if response.status != 200:
                    raise StreamError(f"status {response.status}: {await response.text()}")
                async for data in response.content.iter_any():
                    if stream.feed(data):
                        self._arrivals[slot].append(time.monotonic())
            if not stream.done:
                raise StreamError("the stream ended without [DONE]")
            counts.finished += 1
        except (aiohttp.ClientError, OSError, StreamError) as error:
            kind = "anything" if isinstance(error, StreamError) else "connections"
            if self._breaks_expected in (kind, "anything"):
                counts.broken += any(stream.texts)  # or else its server was gone already
            else:
                counts.failed += 1
                if len(counts.reasons) < KEPT_REASONS:
                    counts.reasons.append(f"slot {slot}: {error!r}"[:500])

    def _compare(self, stream: Stream) -> None:
        """What came with what should have: all of it, or up to where it broke off."""
        if self._expectation is None:
            if stream.done:
                self.counts.lost += max(0, stream.num_tokens - stream.num_counted)
                self.counts.repeated += max(0, stream.num_counted - stream.num_tokens)
            return
        for choice, text in enumerate(stream.texts):
            got = text.split()
            if not stream.done:
                got = got[:-1]  # may be cut in the middle
            count = stream.num_tokens if stream.done else len(got)
            want = self._expectation.words(stream.prompt, choice, count)
            lost, repeated = lost_and_repeated(want, got)
            self.counts.lost += lost
            self.counts.repeated += repeated
            if lost or repeated:
                self._keep_difference(stream, choice, want, got)

    def _keep_difference(
        self, stream: Stream, choice: int, want: list[str], got: list[str]
    ) -> None:
        place = next(
            (i for i, (a, b) in enumerate(zip(want, got, strict=False)) if a != b),
            min(len(want), len(got)),
        )
        if len(self.counts.reasons) < KEPT_REASONS:
            around = slice(max(0, place - 3), place + 4)
            self.counts.reasons.append(
                f"choice {choice} of {stream.body}: token {place} of {len(want)} "
                f"({len(got)} came): want {want[around]}, got {got[around]}"
            )


async def main() -> None:
    streams, seed, *folder = sys.argv[1:]
    load = Load(int(streams), int(seed), Path(folder[0]) if folder else None)
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    print("@@ {}", flush=True)
    while line := await reader.readline():
        print("@@", json.dumps(await load.obey(json.loads(line))), flush=True)
    await load.obey({"do": "stop"})


if __name__ == "__main__":
    asyncio.run(main())
