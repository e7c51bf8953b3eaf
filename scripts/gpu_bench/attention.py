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

import torch
from attention_inputs import (
    LAUNCHES,
    Prefill,
    contexts_of,
    make_caches,
    make_decode,
    make_prefill,
    pairs,
    scaled,
)
from attention_space import MODELS

from ringcast.kernels.gpu.architecture import architecture_of
from ringcast.kernels.gpu.decode_attention import decode_scratch
from ringcast.kernels.gpu.decode_plan import DecodeConfig, choose_decode_config
from ringcast.kernels.gpu.fused_decode_attention import (
    SplitConfig,
    choose_split_config,
    fused_decode_attention,
)
from ringcast.kernels.gpu.prefill_attention import (
    PrefillConfig,
    can_describe,
    choose_prefill_config,
)

BANDWIDTH = 4.3e12
DECODE_SHAPES = "2x1024,8x96,8x800,64x96,64x800,256x800,16xmixed,32xmixed,64xmixed,256xmixed"
PREFILL_SHAPES = "32x2048,8x1024+1024,4x8192"


def microseconds(launch: Callable[[int], object], layers: int, replays: int) -> float:
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
    model, dtype = MODELS[options.model]._replace(window=options.window), dtype_of(options)
    contexts, _ = contexts_of(shape)
    caches = make_caches(contexts, *model[1:3], options.block_size, dtype)
    row_bytes = model.head_size * dtype.itemsize
    config: DecodeConfig | SplitConfig
    launch: Callable[[int], object]
    if options.kernel == "decode":
        on = architecture_of(caches.layers.device)
        config = choose_decode_config(*model[1:3], dtype.itemsize, on)._replace(**changes)
        launch = make_decode(model, caches, dtype).launcher(config, options.pdl)
    else:
        longest = int(contexts.max())
        bounds = (len(contexts), model.kv_heads, longest, options.window, row_bytes)
        config = choose_split_config(*bounds)._replace(**changes)
        launch = fused_launcher(options, caches, config)
    took = microseconds(launch, len(caches.layers), options.replays)
    seen = contexts.clip(max=options.window) if options.window else contexts
    floor = seen.sum() * 2 * model.kv_heads * row_bytes / BANDWIDTH * 1e6
    print(
        f"{shape:14} {took:9.2f} us {100 * floor / took:6.1f} % of the floor   {config}", flush=True
    )


def dtype_of(options: argparse.Namespace) -> torch.dtype:
    return getattr(torch, options.dtype)


def fused_launcher(options, caches, config) -> Callable[[int], object]:
    model, sequences = MODELS[options.model]._replace(window=options.window), len(caches.rows)
    columns = (model.heads + 2 * model.kv_heads) * model.head_size
    qkv = torch.randn(sequences, columns, device="cuda", dtype=dtype_of(options))
    out = qkv.new_empty(sequences, model.heads * model.head_size)
    workers = sequences * config.splits
    scratch = decode_scratch(sequences, model.heads, model.head_size, workers, "cuda")
    rest = (*caches[1:], out, scratch)
    context = caches.context.long()
    blocks = caches.tables[caches.rows, (context - 1) // options.block_size].long()
    slots = (blocks * options.block_size + (context - 1) % options.block_size).int()
    cos, sin = torch.randn(2, int(context.max()) + 1, model.head_size // 2, device="cuda")
    weight = torch.ones(model.head_size, device="cuda") if options.norm else None
    how = {**scaled(model), "config": config, "pdl": options.pdl}
    how |= {"heads": model.heads, "q_weight_D": weight, "k_weight_D": weight}
    before = (qkv, caches.context - 1, slots, cos, sin)
    return lambda layer: fused_decode_attention(*before, *caches.layers[layer], *rest, **how)


def time_prefill(options: argparse.Namespace, shape: str, changes: dict[str, int]) -> None:
    model, dtype = MODELS[options.model]._replace(window=options.window), dtype_of(options)
    contexts, lengths = contexts_of(shape)
    caches = make_caches(contexts, *model[1:3], options.block_size, dtype)
    described = can_describe(caches.layers[0, 0], dtype, model.heads // model.kv_heads)
    key = (model.head_size, dtype.itemsize, options.window > 0, described)
    on = architecture_of(caches.layers.device)
    config = choose_prefill_config(*key, on)._replace(**changes)
    inputs = make_prefill(model, caches, lengths, dtype)
    launch = inputs.launcher(config, options.pdl)
    took = microseconds(launch, len(caches.layers), options.replays)
    operations = 4 * model.heads * model.head_size * pairs(contexts, lengths, options.window)
    line = f"{shape:14} {took:9.1f} us {operations / took / 1e6:6.1f} TFLOP/s   {config}"
    if options.compare:
        line += "   " + compared(inputs, operations, options)
    print(line, flush=True)


def compared(inputs: Prefill, operations: float, options: argparse.Namespace) -> str:
    """torch's dense varlen attention on as much work."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return f"torch {torch.__version__} has no varlen_attn"
    model, contexts = inputs.model, inputs.caches.context
    query = inputs.q.unflatten(1, (model.heads, model.head_size))
    key, value = torch.randn(
        2, int(contexts.sum()), model.heads, model.head_size, device="cuda", dtype=query.dtype
    )
    key_starts = torch.nn.functional.pad(contexts.cumsum(0), (1, 0)).int()
    known = inspect.signature(varlen_attn).parameters
    left = options.window - 1 if options.window else -1
    how = {"is_causal": True} if "is_causal" in known else {"window_size": (left, 0)}
    rest = (inputs.starts, key_starts, int(inputs.lengths.max()), int(contexts.max()))
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
