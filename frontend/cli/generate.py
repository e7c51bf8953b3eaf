"""`ringcast generate`: complete prompts, one as it comes or many in a batch."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from ...mq.config import EngineConfig
from ...mq.errors import ConfigError
from ...mq.sampling_params import SamplingParams
from ..llm import LLM
from ..outputs import RequestOutput
from .options import add_options, read_options
from .sampling import add_sampling_options, read_sampling

DEFAULT_MAX_TOKENS = 256


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--prompt",
        action="append",
        metavar="TEXT",
        help="a prompt; may be given several times (default: each line of standard input is one)",
    )
    parser.add_argument(
        "--chat", action="store_true", help="give each prompt to the model as a user's message"
    )
    parser.add_argument("--n", type=int, default=1, metavar="N", help="outputs for each prompt")
    parser.add_argument("--json", action="store_true", help="print a line of JSON for each prompt")
    add_sampling_options(parser, f"{DEFAULT_MAX_TOKENS}")
    add_options(parser, EngineConfig)


def run(args: argparse.Namespace) -> int:
    config = read_options(args, EngineConfig)
    given = {"max_tokens": DEFAULT_MAX_TOKENS, **read_sampling(args), "n": args.n}
    SamplingParams(**given)  # what is wrong with them is said before anything starts
    prompts = args.prompt or _read_lines()
    with LLM(**msgspec.structs.asdict(config)) as llm:
        defaults = msgspec.structs.asdict(llm.get_default_sampling_params())
        params = SamplingParams(**{**defaults, **given})
        if len(prompts) == 1 and args.n == 1 and not args.json:
            _stream(llm, prompts[0], args.chat, params)
        else:
            _batch(llm, prompts, args.chat, params, args.json)
    return 0


def _read_lines() -> list[str]:
    if sys.stdin.isatty():
        raise ConfigError("no prompt: give --prompt TEXT, or lines on standard input")
    lines = [line for line in sys.stdin.read().splitlines() if line.strip()]
    if not lines:
        raise ConfigError("no prompt: standard input has no line that isn't empty")
    return lines


def _stream(llm: LLM, prompt: str, chat: bool, params: SamplingParams) -> None:
    outputs = llm.stream_chat(_message(prompt), params) if chat else llm.stream(prompt, params)
    for piece in new_text(outputs):
        print(piece, end="", flush=True)
    print()


def _batch(llm: LLM, prompts: list[str], chat: bool, params: SamplingParams, json: bool) -> None:
    show = sys.stderr.isatty()
    if chat:
        results = llm.chat([_message(prompt) for prompt in prompts], params, use_tqdm=show)
    else:
        results = llm.generate(prompts, params, use_tqdm=show)
    for prompt, result in zip(prompts, results, strict=True):
        if json:
            print(msgspec.json.encode(_as_json(prompt, result)).decode())
        else:
            for output in result.outputs:
                print(output.text)


def new_text(outputs: Iterable[RequestOutput]) -> Iterator[str]:
    """What each output adds to the one before it."""
    length = 0
    for output in outputs:
        text = output.outputs[0].text
        yield text[length:]
        length = len(text)


def _message(prompt: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": prompt}]


def _as_json(prompt: str, result: RequestOutput) -> dict[str, Any]:
    return {
        "prompt": prompt,
        "num_prompt_tokens": result.num_prompt_tokens,
        "num_cached_tokens": result.num_cached_tokens,
        "outputs": [dataclasses.asdict(output) for output in result.outputs],
    }
