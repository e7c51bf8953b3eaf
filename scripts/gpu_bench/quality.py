"""What fp8 and int4 cost in quality on a GPU, measured on any machine: the GPU's runner over the
default model's real weights, with the references of its kernels where there is no device.

    quality.py [--text FILE]

What is rounded, and where, is the same as on the device; only sums are added up in another order.
The 4-bit weights are rounded to the nearest (no calibration) in groups of 64, as an AWQ checkpoint
that this makes in a folder of its own.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

HERE = Path(__file__).resolve()
sys.path.append(str(HERE.parents[1]))

from figures import machine, table  # noqa: E402

from ringcast.executor.gpu import (  # noqa: E402
    attention,
    decoder,
    linears,
    sampler,
    sampler_logprobs,
)
from ringcast.executor.gpu.int4_checkpoints import AWQ_PLACES, PER_INT  # noqa: E402
from ringcast.executor.gpu.runner import GpuModelRunner  # noqa: E402
from ringcast.frontend.hub import resolve_model  # noqa: E402
from ringcast.kernels.gpu import logprobs, step  # noqa: E402
from ringcast.mq import codec  # noqa: E402
from ringcast.mq.config import EngineConfig, build  # noqa: E402
from ringcast.mq.messages import NewSequence, StepPlan  # noqa: E402
from ringcast.mq.sampling_params import SamplingParams  # noqa: E402

TEXT = HERE.parents[1] / "data" / "moby_dick.txt"
GROUP = 64
USERS = {
    attention: (
        "decode_attention",
        "fused_decode_attention",
        "prefill_attention",
        "rope_and_cache",
    ),
    decoder: ("add_rms_norm", "embed", "few_linear", "gated_activation", "rms_norm"),
    linears: ("quantize_rows", "fp8_linear", "int4_linear"),
    sampler: ("sample_plain",),
    step: ("append_tokens", "apply_changes", "lay_out_tokens"),
}


def take_references() -> None:
    for user, names in USERS.items():
        for name in names:
            module = importlib.import_module(getattr(user, name).__module__)
            setattr(user, name, getattr(module, f"{name}_reference"))
    linears.Linear.into = product  # type: ignore[method-assign]
    sampler_logprobs.token_logprobs = logprobs_of_chosen


def logprobs_of_chosen(
    logits_NV: torch.Tensor,
    places_M: torch.Tensor,
    chosen_M: torch.Tensor,
    num_top: int,
    *,
    vocab_size: int,
) -> logprobs.Logprobs:
    """In one piece of memory, as the kernel's. The reference ranks all tokens, which takes minutes,
    and nobody looks at ranks here.
    """
    assert num_top == 0
    raw = logits_NV[places_M.long(), :vocab_size].float().log_softmax(-1)
    count = len(chosen_M)
    whole = torch.zeros(3 * count, dtype=torch.int32)
    whole[:count] = chosen_M
    own = whole[count : 2 * count].view(torch.float32)
    own.copy_(raw.gather(1, chosen_M.long()[:, None])[:, 0])
    return logprobs.Logprobs(whole[:count, None], own[:, None], whole[2 * count :])


def product(
    self: linears.Linear, x_TK: torch.Tensor, out_TN: torch.Tensor, pdl: bool = False
) -> None:
    """As the device's: added up in float32, and rounded once. (Processors without arithmetic for
    bfloat16 take minutes for products of it.)
    """
    result = x_TK.float() @ self.weight_NK.float().t()
    out_TN.copy_(result if self.bias_N is None else result + self.bias_N.float())


def perplexity(device: torch.device, text: str, **options: Any) -> tuple[float, int]:
    config = build(
        EngineConfig,
        {
            "device": "cuda",
            "enforce_eager": True,
            "dtype": "bfloat16",
            "max_model_len": 2048,
            "max_num_batched_tokens": 2048,
            "max_num_seqs": 256,
            "num_gpu_blocks_override": 64,
            **options,
        },
    )
    spec = resolve_model(config)
    ids = tokens_of(spec.tokenizer_path, text)
    runner = GpuModelRunner(config, spec, 0, device)
    runner.load(lambda *_: None)
    blocks = list(range(1, 2 + len(ids) // config.block_size))
    params = SamplingParams(temperature=0, prompt_logprobs=0)
    new = NewSequence(0, "text", 0, codec.pack(ids), len(ids), 0, codec.pack(blocks), params)
    rows, lengths = codec.pack([0]), codec.pack([len(ids)])
    output = runner.execute(StepPlan(1, b"", [new], b"", b"", b"", b"", rows, lengths))
    chosen = np.concatenate(
        [
            np.frombuffer(part.logprobs.logprobs, np.float32).reshape(-1, part.logprobs.width)[:, 0]
            for part in output.prompt_logprobs
        ]
    )
    assert len(chosen) == len(ids) - 1
    return math.exp(-float(chosen.astype(np.float64).mean())), len(chosen)


def tokens_of(folder: str, text: str) -> list[int]:
    from tokenizers import Tokenizer

    return Tokenizer.from_file(f"{folder}/tokenizer.json").encode(text).ids


def make_awq(source: Path, folder: Path) -> None:
    """Every linear layer of the checkpoint in `source`, rounded to 4 bits."""
    tensors: dict[str, torch.Tensor] = {}
    for name, weight in load_file(source / "model.safetensors").items():
        if not name.endswith("_proj.weight"):
            tensors[name] = weight
            continue
        q_KN, scales_GN, zeros_GN = round_to_four_bits(weight.float().T)
        prefix = name.removesuffix("weight")
        tensors |= {
            f"{prefix}qweight": pack(q_KN),
            f"{prefix}qzeros": pack(zeros_GN),
            f"{prefix}scales": scales_GN.half(),
        }
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "awq",
        "bits": 4,
        "group_size": GROUP,
        "zero_point": True,
        "version": "gemm",
    }
    (folder / "config.json").write_text(json.dumps(config))
    for path in source.iterdir():
        if path.is_file() and path.name not in ("config.json", "model.safetensors"):
            shutil.copy(path, folder)


def round_to_four_bits(weight_KN: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    inputs, outputs = weight_KN.shape
    groups = weight_KN.view(inputs // GROUP, GROUP, outputs)
    low, high = groups.amin(1).clamp(max=0), groups.amax(1).clamp(min=0)
    scales_GN = ((high - low) / 15).clamp(min=1e-8).half().float()
    zeros_GN = (-low / scales_GN).round().clamp(0, 15)
    q = (groups / scales_GN[:, None] + zeros_GN[:, None]).round().clamp(0, 15)
    return q.view(inputs, outputs).int(), scales_GN, zeros_GN.int()


def pack(numbers: torch.Tensor) -> torch.Tensor:
    """[.., N] of 4 bits, to [.., N / 8] in AWQ's order."""
    eight = numbers.unflatten(-1, (-1, PER_INT)).long()
    packed = torch.zeros(eight.shape[:-1], dtype=torch.long)
    for output, place in enumerate(AWQ_PLACES):
        packed |= eight[..., output] << (4 * place)
    return torch.where(packed >= 1 << 31, packed - (1 << 32), packed).int()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--text", type=Path, default=TEXT)
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu":
        take_references()
    text, rows, first = args.text.read_text(), [], 0.0
    with tempfile.TemporaryDirectory() as scratch:
        make_awq(Path(resolve_model(build(EngineConfig, {"device": "fake"})).path), Path(scratch))
        variants: list[tuple[str, dict[str, Any]]] = [
            ("bf16", {}),
            ("fp8 KV cache", {"kv_cache_dtype": "fp8"}),
            ("fp8 weights and activations", {"quantization": "fp8"}),
            ("both", {"quantization": "fp8", "kv_cache_dtype": "fp8"}),
            ("4-bit weights (AWQ's form, not calibrated)", {"model": scratch}),
        ]
        for name, options in variants:
            value, count = perplexity(device, text, **options)
            first = first or value
            rows.append([name, f"{value:.2f}", f"{value / first:.4f}"])
            print(f"{name}: {value:.3f}", flush=True)
    print(f"\n{count} tokens foreseen of {args.text.name}; {machine()}\n")
    print(table(["", "perplexity", "to bf16's"], rows))


if __name__ == "__main__":
    main()
