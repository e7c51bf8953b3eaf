"""Perplexity of a model on a text frozen in scripts/data (the opening of Moby-Dick, 1851), for each
precision: `.venv/bin/python -P scripts/perplexity.py [--model NAME] [--quantization int8 ...]`.

The text is run through the model runner's own parts, as one prompt in steps of `--chunk` tokens, so
what is measured is what is served. A decode step is the same arithmetic for fewer rows.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from tokenizers import Tokenizer

from ringcast.executor.cpu_runner import CpuModelRunner
from ringcast.frontend.hub import resolve_model
from ringcast.mq import codec, messages
from ringcast.mq.config import DEFAULT_MODEL, EngineConfig, ModelSpec, build
from ringcast.mq.sampling_params import SamplingParams

TEXT = Path(__file__).parent / "data" / "moby_dick.txt"


@torch.inference_mode()
def all_logits(config: EngineConfig, spec: ModelSpec, tokens: list[int]) -> torch.Tensor:
    """float32 [len(tokens) - 1, vocabulary]: what follows each token but the last."""
    runner = CpuModelRunner(config, spec)
    runner.load(lambda *_: None)
    batch, model = runner._batch, runner._model
    blocks = codec.pack(range(1, -(-len(tokens) // config.block_size) + 1))
    text = messages.NewSequence(
        0, "text", 0, codec.pack(tokens), len(tokens), 0, blocks, SamplingParams()
    )
    batch.apply(messages.StepPlan(0, b"", [text], b"", b"", b"", b"", b"", b""))
    row, some, logits = codec.ints(codec.pack([0])), len(batch.last), []
    for start in range(0, len(tokens) - 1, config.max_num_batched_tokens):
        count = min(config.max_num_batched_tokens, len(tokens) - 1 - start)
        model.forward(batch.prepare(row, codec.ints(codec.pack([count]))))
        for first in range(0, count, some):
            here = min(some, count - first)
            batch.last[:here] = range(first, first + here)
            logits.append(model.logits(here).clone())
    return torch.cat(logits)


def perplexity(logits: torch.Tensor, tokens: list[int]) -> float:
    """exp of the mean negative log-likelihood of every token after the first."""
    return torch.nn.functional.cross_entropy(logits, torch.tensor(tokens[1:])).exp().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--quantization", nargs="*", default=["none", "int8", "int4"])
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--chunk", type=int, default=512)
    parser.add_argument("--text", type=Path, default=TEXT)
    args = parser.parse_args()
    options = {"model": args.model, "dtype": args.dtype, "max_num_batched_tokens": args.chunk}
    options |= {"max_num_seqs": min(128, args.chunk), "kv_cache_memory_bytes": 1 << 29}
    spec = resolve_model(build(EngineConfig, options))
    tokenizer = Tokenizer.from_file(f"{spec.tokenizer_path}/tokenizer.json")
    tokens = tokenizer.encode(args.text.read_text()).ids
    print(f"{spec.name}: {len(tokens)} tokens of {args.text.name}")
    for quantization in args.quantization:
        config = build(EngineConfig, options | {"quantization": quantization})
        value = perplexity(all_logits(config, spec, tokens), tokens)
        print(f"{quantization:8} {value:.3f}", flush=True)


if __name__ == "__main__":
    main()
