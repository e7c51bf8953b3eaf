"""scripts/bench perplexity: a model's quality at each precision, as a Markdown table.

The text is frozen in scripts/data (the opening of Moby-Dick, 1851). It goes through `LLM` as one
prompt whose log-probabilities are asked for, so what is measured is what is served; a decode step
is the same arithmetic for fewer rows. Every model is measured with each of the options, and held
against the first of all: a quantised checkpoint against the one it was made from.
"""

from __future__ import annotations

import argparse
import json
from itertools import product
from pathlib import Path
from typing import Any

from figures import machine, perplexity, table

from ringcast import LLM, SamplingParams
from ringcast.mq.config import DEFAULT_MODEL
from ringcast.mq.devices import find_device

TEXT = Path(__file__).resolve().parent / "data" / "moby_dick.txt"
# What a device has of each option, where none is asked for.
VARIANTS = {
    "cpu": {"quantization": ["none", "int8", "int4"], "kv_cache_dtype": ["auto"]},
    "cuda": {"quantization": ["none", "fp8"], "kv_cache_dtype": ["auto", "fp8"]},
}
PARAMS = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", nargs="+", default=[DEFAULT_MODEL])
    parser.add_argument("--quantization", nargs="+", help="by default what the device has")
    parser.add_argument("--kv-cache-dtype", nargs="+", help="by default what the device has")
    parser.add_argument("--text", type=Path, default=TEXT)
    parser.add_argument(
        "--option", action="append", default=[], help="name=json, an option of `LLM`"
    )


def run(args: argparse.Namespace) -> None:
    text = args.text.read_text()
    options = {name: json.loads(value) for name, value in (o.split("=", 1) for o in args.option)}
    known = VARIANTS.get(options.get("device", "auto"), VARIANTS[find_device()])
    names = args.quantization or known["quantization"]
    caches = args.kv_cache_dtype or known["kv_cache_dtype"]
    rows, first = [], 0.0
    for model, quantization, cache in product(args.model, names, caches):
        variant = {"quantization": quantization, "kv_cache_dtype": cache}
        logprobs = of_text(text, model, **variant, **options)
        value = perplexity(logprobs)
        first = first or value
        rows.append([model, quantization, cache, f"{value:.2f}", f"{value / first:.4f}"])
    print(f"{len(logprobs)} tokens foreseen of {args.text.name}; {machine()}\n")
    print(table(["model", "quantization", "KV cache", "perplexity", "to the first's"], rows))


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
