"""Times the attention kernels on a GPU: microseconds, and how near they are to the hardware.

    attention.py decode                          # default configurations, all shapes
    attention.py fused --shapes 1x1024,8x800
    attention.py decode --shapes 64x800 --tile 32,64 --warps 2,4 --stages 2,3,4   # all of these
    attention.py prefill --model llama --tile 64,128 --stages 2,3

A shape is SEQUENCESxTOKENS; `256xmixed` has contexts from 100 to 2048, and a prefill shape may have
a cached prefix, `8x1024+1024`. One CUDA graph holds many launches, which go over the caches of
different layers, so that none is found in L2. The floor of decode is the bytes of K and V at 4.3
TB/s, what a copy reaches on an H200. Prefill is in TFLOP/s of the pairs that the causal mask
leaves, and beside torch's dense varlen_attn where there is one (its keys repeated for each query
head, its time not counting that). Whether results are right is tested in tests/kernels/gpu.
"""

from __future__ import annotations

import argparse
import inspect
import itertools
import sys
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import torch

from ringcast.kernels.gpu.decode_attention import decode_attention, decode_scratch
from ringcast.kernels.gpu.decode_plan import DecodeConfig, choose_decode_config, plan_decode
from ringcast.kernels.gpu.fused_decode_attention import (
    SplitConfig,
    choose_split_config,
    fused_decode_attention,
)
from ringcast.kernels.gpu.prefill_attention import (
    PrefillConfig,
    choose_prefill_config,
    plan_tiles,
    prefill_attention,
)

BANDWIDTH = 4.3e12
DECODE_SHAPES = "2x1024,8x96,8x800,64x96,64x800,256x800,16xmixed,32xmixed,64xmixed,256xmixed"
PREFILL_SHAPES = "32x2048,8x1024+1024,4x8192"
# Bytes of K and V that the launches of a graph go over, several times the L2.
ROTATED = 1 << 29
LAUNCHES = 48


class Model(NamedTuple):
    heads: int
    kv_heads: int
    head_size: int


MODELS = {
    "qwen3": Model(16, 8, 128),
    "llama": Model(32, 8, 128),
    "smollm2": Model(9, 3, 64),
    "gemma3": Model(4, 1, 256),
}


class Caches(NamedTuple):
    """K and V of several layers, `[layers, 2, blocks, kv_heads, block_size, D]`, and whose."""

    layers: torch.Tensor
    tables: torch.Tensor
    rows: torch.Tensor
    context: torch.Tensor


def make_caches(contexts: np.ndarray, model: Model, block_size: int, dtype: torch.dtype) -> Caches:
    blocks = -(-contexts // block_size)
    token_bytes = 2 * model.kv_heads * model.head_size * dtype.itemsize
    layers = int(np.clip(ROTATED // (contexts.sum() * token_bytes), 3, LAUNCHES))
    order = torch.randperm(int(blocks.sum()), dtype=torch.int32) + 1
    tables = torch.zeros(len(contexts), int(blocks.max()), dtype=torch.int32)
    for row, (number, end) in enumerate(zip(blocks, np.cumsum(blocks), strict=True)):
        tables[row, :number] = order[end - number : end]
    shape = (layers, 2, len(order) + 1, model.kv_heads, block_size, model.head_size)
    return Caches(
        torch.randn(shape, device="cuda", dtype=dtype),
        tables.cuda(),
        torch.arange(len(contexts), dtype=torch.int32, device="cuda"),
        torch.from_numpy(contexts.astype(np.int32)).cuda(),
    )


def contexts_of(shape: str) -> tuple[np.ndarray, np.ndarray]:
    """Contexts, and query tokens where the shape is one of prefill."""
    sequences, _, tokens = shape.partition("x")
    if tokens == "mixed":
        contexts = np.random.default_rng(0).integers(100, 2049, int(sequences))
        return contexts, np.ones_like(contexts)
    length, _, prefix = tokens.partition("+")
    lengths = np.full(int(sequences), int(length))
    return lengths + int(prefix or 0), lengths


def microseconds(launch: Callable[[int], None], layers: int, replays: int) -> float:
    """Of one of the many launches in a replayed graph; launch(layer) makes one. The best replay."""
    launch(0)
    torch.cuda.synchronize()
    count = max(layers, LAUNCHES // layers * layers)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for number in range(count):
            launch(number % layers)
    graph.replay()
    best = float("inf")
    for _ in range(replays):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        best = min(best, begin.elapsed_time(end) * 1000 / count)
    return best


def combinations(options: argparse.Namespace, names: list[str]) -> Iterator[dict[str, int]]:
    """The product of the lists that were given, as replacements in a default configuration."""
    given = [name for name in names if getattr(options, name)]
    lists = [[int(value) for value in getattr(options, name).split(",")] for name in given]
    for values in itertools.product(*lists):
        yield dict(zip(given, values, strict=True))


def time_decode(options: argparse.Namespace, shape: str, changes: dict[str, int]) -> None:
    model, dtype = MODELS[options.model], getattr(torch, options.dtype)
    contexts, _ = contexts_of(shape)
    caches = make_caches(contexts, model, options.block_size, dtype)
    sequences, longest = len(contexts), int(contexts.max())
    row_bytes = model.head_size * dtype.itemsize
    config: DecodeConfig | SplitConfig
    if options.kernel == "decode":
        config = choose_decode_config(model.kv_heads, model.head_size, dtype.itemsize)._replace(
            **changes
        )
        workers = config.workers
    else:
        config = choose_split_config(sequences, model.kv_heads, longest, options.window, row_bytes)
        config = config._replace(**changes)
        workers = sequences * config.splits
    scratch = decode_scratch(sequences, model.heads, model.head_size, workers, "cuda")
    q = torch.randn(sequences, model.heads * model.head_size, device="cuda", dtype=dtype)
    out = torch.empty_like(q)
    launch = decode_launch(options, model, caches, q, out, scratch, config)
    took = microseconds(launch, len(caches.layers), options.replays)
    seen = np.minimum(contexts, options.window) if options.window else contexts
    floor = seen.sum() * 2 * model.kv_heads * row_bytes / BANDWIDTH * 1e6
    print(
        f"{shape:14} {took:9.2f} us {100 * floor / took:6.1f} % of the floor   {config}", flush=True
    )


def decode_launch(options, model, caches, q, out, scratch, config) -> Callable[[int], None]:
    """A launch of the decode kernel, or of the fused one."""
    how = {
        "kv_heads": model.kv_heads,
        "scale": model.head_size**-0.5,
        "window": options.window,
        "config": config,
        "pdl": options.pdl,
    }
    if options.kernel == "decode":
        plan = plan_decode(caches.context.cpu().numpy(), options.window, config)
        rest = (*caches[1:], torch.from_numpy(plan).cuda(), out, scratch)
        return lambda layer: decode_attention(q, *caches.layers[layer], *rest, **how)
    rest = (*caches[1:], out, scratch)
    context = caches.context.long()
    blocks = caches.tables[caches.rows, (context - 1) // options.block_size].long()
    slots = (blocks * options.block_size + (context - 1) % options.block_size).int()
    columns = (model.heads + 2 * model.kv_heads) * model.head_size
    qkv = torch.randn(len(q), columns, device="cuda", dtype=q.dtype)
    cos, sin = torch.randn(2, int(context.max()) + 1, model.head_size // 2, device="cuda")
    weight = torch.ones(model.head_size, device="cuda") if options.norm else None
    how |= {"heads": model.heads, "q_weight_D": weight, "k_weight_D": weight}
    before = (qkv, caches.context - 1, slots, cos, sin)
    return lambda layer: fused_decode_attention(*before, *caches.layers[layer], *rest, **how)


def time_prefill(options: argparse.Namespace, shape: str, changes: dict[str, int]) -> None:
    model, dtype = MODELS[options.model], getattr(torch, options.dtype)
    contexts, lengths = contexts_of(shape)
    caches = make_caches(contexts, model, options.block_size, dtype)
    group = model.heads // model.kv_heads
    config = choose_prefill_config(caches.layers[0, 0], dtype, group)._replace(**changes)
    tiles = torch.from_numpy(plan_tiles(lengths, group, contexts, config.rows)).cuda()
    starts = torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)).cuda()
    q = torch.randn(int(lengths.sum()), model.heads * model.head_size, device="cuda", dtype=dtype)
    out = torch.empty_like(q)
    how = {
        "scale": model.head_size**-0.5,
        "kv_heads": model.kv_heads,
        "window": options.window,
        "config": config,
        "pdl": options.pdl,
    }

    def launch(layer: int) -> None:
        cache = caches.layers[layer]
        rest = (caches.tables, caches.rows, starts, caches.context, tiles, out)
        prefill_attention(q, *cache, *rest, **how)

    took = microseconds(launch, len(caches.layers), options.replays)
    operations = 4 * model.heads * model.head_size * pairs(contexts, lengths, options.window)
    line = f"{shape:14} {took:9.1f} us {operations / took / 1e6:6.1f} TFLOP/s   {config}"
    if options.compare:
        line += "   " + compared(q, starts, contexts, lengths, model, operations, options)
    print(line, flush=True)


def pairs(contexts: np.ndarray, lengths: np.ndarray, window: int) -> int:
    """Queries by the keys they see."""
    total = 0
    for context, length in zip(contexts.tolist(), lengths.tolist(), strict=True):
        seen = np.arange(context - length + 1, context + 1)
        total += int(np.minimum(seen, window).sum() if window else seen.sum())
    return total


def compared(q, starts, contexts, lengths, model, operations, options) -> str:
    """torch's dense varlen attention on as much work."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return f"torch {torch.__version__} has no varlen_attn"
    query = q.unflatten(1, (model.heads, model.head_size))
    key, value = torch.randn(
        2, int(contexts.sum()), model.heads, model.head_size, device="cuda", dtype=q.dtype
    )
    key_starts = np.concatenate([[0], np.cumsum(contexts)]).astype(np.int32)
    key_starts = torch.from_numpy(key_starts).cuda()
    known = inspect.signature(varlen_attn).parameters
    left = options.window - 1 if options.window else -1
    how = {"is_causal": True} if "is_causal" in known else {"window_size": (left, 0)}
    rest = (starts, key_starts, int(lengths.max()), int(contexts.max()))
    took = microseconds(
        lambda layer: varlen_attn(query, key, value, *rest, **how), 1, options.replays
    )
    return f"varlen_attn {took:.1f} us {operations / took / 1e6:.1f} TFLOP/s"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kernel", choices=["decode", "fused", "prefill"])
    parser.add_argument("--model", choices=MODELS, default="qwen3", help="whose heads")
    parser.add_argument("--shapes", help=f"{DECODE_SHAPES}, or {PREFILL_SHAPES}")
    parser.add_argument("--dtype", choices=["bfloat16", "float16"], default="bfloat16")
    parser.add_argument("--block-size", type=int, default=64)
    parser.add_argument("--window", type=int, default=0, help="sliding window, 0 for none")
    parser.add_argument("--norm", action="store_true", help="QK-norm in the fused kernel")
    parser.add_argument("--pdl", action="store_true", help="programmatic dependent launch")
    parser.add_argument("--replays", type=int, default=10, help="of each graph; the best counts")
    parser.add_argument("--compare", action="store_true", help="prefill beside torch's varlen_attn")
    fields = DecodeConfig._fields + SplitConfig._fields + PrefillConfig._fields
    for name in dict.fromkeys(fields):
        parser.add_argument(f"--{name}", help="values to try, by commas")
    return parser.parse_args()


def main() -> None:
    options = parse_arguments()
    if not torch.cuda.is_available():
        sys.exit("There is no CUDA device here.")
    torch.manual_seed(0)
    prefill = options.kernel == "prefill"
    names = {"prefill": PrefillConfig, "decode": DecodeConfig, "fused": SplitConfig}[
        options.kernel
    ]._fields
    time_one = time_prefill if prefill else time_decode
    shapes = options.shapes or (PREFILL_SHAPES if prefill else DECODE_SHAPES)
    print(f"{options.kernel}, {options.model} {MODELS[options.model]}, {options.dtype}")
    for shape in shapes.split(","):
        for changes in combinations(options, list(names)):
            time_one(options, shape, changes)


if __name__ == "__main__":
    main()
