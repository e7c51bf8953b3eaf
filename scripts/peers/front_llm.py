"""An engine of scripts/bench front without HTTP, in a process that does nothing else.

front_llm.py generate|stream MODEL WORDS OPTIONS: `LLM.generate` of all prompts at once, or
`AsyncLLM` with one task for each, which takes each token as it comes. After "@@" it says the
processes as {name: pid}; then it obeys and answers lines as front_load.py does. `generate` sees no
tokens come, so it has no times.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from itertools import pairwise
from typing import Any

import uvloop

from ringcast import LLM, AsyncLLM, SamplingParams
from ringcast.mq.sampling_params import RequestOutputKind


def say(value: object) -> None:
    print("@@" + json.dumps(value), flush=True)


def pids_of(status: Any) -> dict[str, int]:
    return {"client": os.getpid(), **{actor.name: actor.pid for actor in status.actors}}


def prompts_of(first: int, count: int, words: int) -> list[str]:
    return [f"{first + i} " + "word " * words for i in range(count)]


def generate(model: str, words: int, options: dict[str, Any]) -> None:
    with LLM(model, **options) as llm:
        say(pids_of(llm.status()))
        for line in sys.stdin:
            first, count, tokens = json.loads(line)
            params = SamplingParams(max_tokens=tokens, ignore_eos=True)
            outputs = llm.generate(prompts_of(first, count, words), params, use_tqdm=False)
            say({"events": sum(len(o.outputs[0].token_ids) for o in outputs)})


async def stream(model: str, words: int, options: dict[str, Any]) -> None:
    async with AsyncLLM(model, **options) as llm:
        say(pids_of(await llm.status()))
        while line := await asyncio.to_thread(sys.stdin.readline):
            first, count, tokens = json.loads(line)
            params = SamplingParams(
                max_tokens=tokens, ignore_eos=True, output_kind=RequestOutputKind.DELTA
            )
            found = await asyncio.gather(
                *(one(llm, prompt, params) for prompt in prompts_of(first, count, words))
            )
            say(
                {
                    "events": sum(events for _, _, events in found),
                    "first": [first for first, _, _ in found],
                    "gaps": [gap for _, gaps, _ in found for gap in gaps],
                }
            )


async def one(llm: AsyncLLM, prompt: str, params: SamplingParams) -> tuple[float, list[float], int]:
    """One stream: seconds to its first token and between tokens, and how many they were."""
    start, times, events = time.perf_counter(), [], 0
    async for output in llm.generate(prompt, params):
        times.append(time.perf_counter())
        events += len(output.outputs[0].token_ids)
    gaps = [b - a for a, b in pairwise(times)]
    return times[0] - start, gaps + [0.0] * (events - len(times)), events


if __name__ == "__main__":
    mode, model, words, options = sys.argv[1:]
    if mode == "generate":
        generate(model, int(words), json.loads(options))
    else:
        uvloop.run(stream(model, int(words), json.loads(options)))
