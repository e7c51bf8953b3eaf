"""scripts/bench perplexity: a model's quality at each precision, as a Markdown table.

The text is frozen in scripts/data (the opening of Moby-Dick, 1851). It goes through `LLM` as one
prompt whose log-probabilities are asked for, so what is measured is what is served; a decode step
is the same arithmetic for fewer rows.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from figures import machine, perplexity, table

from ringcast import LLM, SamplingParams
from ringcast.mq.config import DEFAULT_MODEL

TEXT = Path(__file__).resolve().parent / "data" / "moby_dick.txt"
PARAMS = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--quantization", nargs="+", default=["none", "int8", "int4"])
    parser.add_argument("--text", type=Path, default=TEXT)
    parser.add_argument(
        "--option", action="append", default=[], help="name=json, an option of `LLM`"
    )


def run(args: argparse.Namespace) -> None:
    text = args.text.read_text()
    options = {name: json.loads(value) for name, value in (o.split("=", 1) for o in args.option)}
    rows, first = [], 0.0
    for quantization in args.quantization:
        logprobs = of_text(text, args.model, quantization=quantization, **options)
        value = perplexity(logprobs)
        first = first or value
        rows.append([quantization, f"{value:.2f}", f"{value / first:.4f}"])
    print(f"{args.model}, {len(logprobs)} tokens foreseen of {args.text.name}; {machine()}\n")
    print(table(["quantization", "perplexity", f"to {args.quantization[0]}'s"], rows))


def of_text(text: str, model: str, **options: Any) -> list[float]:
    """The log-probability of each token of `text` after the first."""
    with LLM(model, **options) as llm:
        (output,) = llm.generate([text], PARAMS, use_tqdm=False)
    assert output.prompt_logprobs is not None
    return [
        entry[token].logprob
        for token, entry in zip(output.prompt_token_ids, output.prompt_logprobs, strict=True)
        if entry is not None
    ]
