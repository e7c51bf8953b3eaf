"""scripts/bench prefix: what the prefix cache finds and saves, as a Markdown table.

Requests share a few system prompts: request i begins with prompt i modulo their number and goes on
with tokens of its own. Two engines, prefix caching on and off, take the same requests in turns, and
each begins a round with an empty cache. A few requests are under way at any time, the next one sent
as one ends; TTFT counts from the moment of sending. Hit rate: prompt tokens found in the cache, of
all prompt tokens. A ratio above 1 means that caching is better.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from figures import machine, number, percentile, table

from ringcast import AsyncLLM, SamplingParams
from ringcast.mq.config import DEFAULT_MODEL
from ringcast.mq.sampling_params import RequestOutputKind

ON, OFF = "on", "off"
HEAD = ["prefix caching", "hit rate", "TTFT p50, ms", "TTFT p99, ms", "a round, s"]


class Workload(NamedTuple):
    """num_prefixes system prompts of prefix_len tokens, shared by num_requests that add own_len."""

    num_prefixes: int
    prefix_len: int
    num_requests: int
    own_len: int

    def prompts(self, seed: int, vocab_size: int) -> list[list[int]]:
        """Token ids, of which the lowest are left out: special tokens are among them."""
        chance = random.Random(seed)

        def tokens(count: int) -> list[int]:
            return [chance.randrange(vocab_size // 10, vocab_size) for _ in range(count)]

        prefixes = [tokens(self.prefix_len) for _ in range(self.num_prefixes)]
        return [
            prefixes[i % self.num_prefixes] + tokens(self.own_len) for i in range(self.num_requests)
        ]

    @property
    def best_hit_rate(self) -> float:
        """If every prefix is computed once."""
        found = max(0, self.num_requests - self.num_prefixes) * self.prefix_len
        return found / (self.num_requests * (self.prefix_len + self.own_len))


class Answer(NamedTuple):
    ttft: float
    num_prompt_tokens: int
    num_cached_tokens: int


class Round(NamedTuple):
    """All answers of one engine to one set of prompts, and the seconds that they took together."""

    answers: list[Answer]
    seconds: float

    @property
    def hit_rate(self) -> float:
        found = sum(answer.num_cached_tokens for answer in self.answers)
        return found / sum(answer.num_prompt_tokens for answer in self.answers)

    def ttft(self, share: float) -> float:
        return percentile((answer.ttft for answer in self.answers), share)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--prefixes", type=int, default=4, help="system prompts")
    parser.add_argument("--prefix-len", type=int, default=512, help="tokens of each")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--own-len", type=int, default=64, help="tokens that a request adds")
    parser.add_argument("--out", type=int, default=16, help="tokens generated for each")
    parser.add_argument("--concurrency", type=int, default=8, help="requests under way")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--option", action="append", default=[], help="name=json, an option of `AsyncLLM`"
    )


def run(args: argparse.Namespace) -> None:
    work = Workload(args.prefixes, args.prefix_len, args.requests, args.own_len)
    before = machine()
    rounds = asyncio.run(_measure(args, work))
    print(
        f"{args.model}: {work.num_requests} requests of {work.prefix_len} shared and "
        f"{work.own_len} own tokens, {work.num_prefixes} system prompts, {args.out} tokens out, "
        f"{args.concurrency} at a time, {args.rounds} rounds; at best {work.best_hit_rate:.1%} "
        f"can be found; {before}\n"
    )
    print(table(HEAD, report(rounds)))


def report(rounds: dict[str, list[Round]]) -> list[list[str]]:
    """Medians of the rounds of each engine, then those of the rounds' ratios with their range."""
    rows = [[name, *_figures(rounds[name])] for name in (OFF, ON)]
    return [*rows, ["off / on", "", *_ratios(rounds[OFF], rounds[ON])]]


def _figures(rounds: Sequence[Round]) -> list[str]:
    p50, p99, seconds = (statistics.median(map(read, rounds)) for read in _READINGS)
    hit_rate = statistics.median(one.hit_rate for one in rounds)
    return [f"{hit_rate:.1%}", number(p50 * 1e3), number(p99 * 1e3), number(seconds)]


def _ratios(off: Sequence[Round], on: Sequence[Round]) -> list[str]:
    texts = []
    for read in _READINGS:
        ratios = [read(a) / read(b) for a, b in zip(off, on, strict=True)]
        spread = f"{number(min(ratios))} to {number(max(ratios))}"
        texts.append(f"{number(statistics.median(ratios))} ({spread})")
    return texts


_READINGS: tuple[Callable[[Round], float], ...] = (
    lambda one: one.ttft(0.5),
    lambda one: one.ttft(0.99),
    lambda one: one.seconds,
)


async def _measure(args: argparse.Namespace, work: Workload) -> dict[str, list[Round]]:
    options = {name: json.loads(value) for name, value in (o.split("=", 1) for o in args.option)}
    params = SamplingParams(
        temperature=0, max_tokens=args.out, ignore_eos=True, output_kind=RequestOutputKind.DELTA
    )
    async with (
        AsyncLLM(args.model, **{**options, "enable_prefix_caching": False}) as off,
        AsyncLLM(args.model, **{**options, "enable_prefix_caching": True}) as on,
    ):
        engines = {OFF: off, ON: on}
        rounds: dict[str, list[Round]] = {OFF: [], ON: []}
        vocab_size = off.spec.vocab_size
        for engine in engines.values():
            await _round(engine, work.prompts(0, vocab_size)[: args.concurrency], params, args)
        for seed in range(1, args.rounds + 1):
            prompts = work.prompts(seed, vocab_size)
            for name in (OFF, ON) if seed % 2 else (ON, OFF):
                rounds[name].append(await _round(engines[name], prompts, params, args))
    return rounds


async def _round(
    engine: AsyncLLM, prompts: list[list[int]], params: SamplingParams, args: argparse.Namespace
) -> Round:
    await engine.reset_prefix_cache()
    free = asyncio.Semaphore(args.concurrency)

    async def one(prompt: list[int]) -> Answer:
        async with free:
            return await _answer(engine, prompt, params)

    start = time.perf_counter()
    answers = await asyncio.gather(*map(one, prompts))
    return Round(answers, time.perf_counter() - start)


async def _answer(engine: AsyncLLM, prompt: list[int], params: SamplingParams) -> Answer:
    start, ttft, found = time.perf_counter(), 0.0, None
    async for output in engine.generate({"prompt_token_ids": prompt}, params):
        ttft = ttft or time.perf_counter() - start
        found = output.num_cached_tokens
    assert found is not None, "the engine must say how much of a prompt it has found"
    return Answer(ttft, len(prompt), found)
