"""Which configuration of few_linear is fastest for each shape, on the GPU that this runs on.

    few_linear.py                                  the shapes of the models below
    few_linear.py --models qwen3-0.6b              of some of them
    few_linear.py --shapes 960x576:norm 576x576:add 3072x576:norm,silu

Launches are replayed from a CUDA graph, one behind the other with programmatic dependent launch, as
in a decode step. They take turns at enough copies of the weight that the L2 cache never serves one.
The floor is the time to read the weight once. torch's column is its linear alone, without the norm,
activation or addition that few_linear does besides.

The last lines are entries for TUNED in kernels/gpu/few_linear_table.py, where `scripts/tune few`
writes them.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from typing import NamedTuple

import torch

from ringcast.kernels.gpu.few_linear import few_linear
from ringcast.kernels.gpu.few_linear_table import Config, configuration, per_thread, rule

NOISE = 0.02  # a configuration must beat the rule by more than this share to be worth an entry
LAUNCHES = 64  # in a graph, at least
CACHE_TIMES = 3  # copies of a weight together fill the L2 cache so many times


class Shape(NamedTuple):
    rows: int
    inputs: int
    parts: tuple[str, ...] = ()  # of "norm", "add", "silu", "gelu_tanh"

    @property
    def activation(self) -> str | None:
        return next((part for part in self.parts if part in ("silu", "gelu_tanh")), None)

    @property
    def gated(self) -> bool:
        return self.activation is not None

    def __str__(self) -> str:
        return f"{self.rows}x{self.inputs}" + (f":{','.join(self.parts)}" if self.parts else "")


def layer(hidden: int, heads: int, kv_heads: int, size: int, inner: int, vocab: int) -> list[Shape]:
    return [
        Shape((heads + 2 * kv_heads) * size, hidden, ("norm",)),
        Shape(hidden, heads * size, ("add",)),
        Shape(2 * inner, hidden, ("norm", "silu")),
        Shape(hidden, inner, ("add",)),
        Shape(vocab, hidden, ("norm",)),
    ]


MODELS = {
    "smollm2-135m": layer(576, 9, 3, 64, 1536, 49152),
    "qwen3-0.6b": layer(1024, 16, 8, 128, 3072, 151936),
    "llama-8b": layer(4096, 32, 8, 128, 14336, 128256),
}


def parse_shape(text: str) -> Shape:
    size, _, parts = text.partition(":")
    rows, _, inputs = size.partition("x")
    names = tuple(parts.split(",")) if parts else ()
    if unknown := set(names) - {"norm", "add", "silu", "gelu_tanh"}:
        raise argparse.ArgumentTypeError(f"{text!r}: unknown {', '.join(sorted(unknown))}")
    try:
        return Shape(int(rows), int(inputs), names)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} isn't ROWSxINPUTS[:part,..]") from None


def candidates(shape: Shape) -> Iterator[Config]:
    """The rule's choice first, then all others that keep registers and programs within reason."""
    chosen = dict.fromkeys([configuration(*shape[:2], shape.gated), rule(*shape[:2], shape.gated)])
    yield from chosen
    whole = 1 << (shape.inputs - 1).bit_length()
    blocks = [block for block in (512, 1024, 2048, 4096, 8192) if block <= whole]
    outputs = shape.rows // 2 if shape.gated else shape.rows
    for rows, warps, block in product((1, 2, 4, 8), (2, 4, 8), blocks):
        config = Config(rows, warps, block)
        held = per_thread(config, shape.inputs, shape.gated)
        enough = outputs // rows >= 256 or rows == 1
        if config not in chosen and enough and 16 <= held <= 128 and -(-shape.inputs // block) <= 8:
            yield config


class Bench:
    """The inputs for one shape: copies of the weight, and everything else once."""

    def __init__(self, shape: Shape, dtype: torch.dtype, pdl: bool) -> None:
        self.shape, self.pdl = shape, pdl
        size = shape.rows * shape.inputs * dtype.itemsize
        cache = torch.cuda.get_device_properties(0).L2_cache_size
        self.weights = [
            torch.randn(shape.rows, shape.inputs, device="cuda", dtype=dtype)
            for _ in range(max(2, -(-CACHE_TIMES * cache // size)))
        ]
        self.x = torch.randn(1, shape.inputs, device="cuda", dtype=dtype)
        outputs = shape.rows // 2 if shape.gated else shape.rows
        self.out = torch.zeros(1, outputs, device="cuda", dtype=dtype)
        self.options = {"activation": shape.activation}
        if "norm" in shape.parts:
            self.options["norm_weight_K"] = torch.ones(shape.inputs, device="cuda")
        if "add" in shape.parts:
            self.options["add_to_1N"] = self.out

    def launch(self, weight: torch.Tensor, config: Config) -> None:
        few_linear(self.x, weight, self.out, config=config, pdl=self.pdl, **self.options)

    def time(self, launch: Callable[[torch.Tensor], object]) -> float:
        """Microseconds a launch: the median of ten replays."""
        rounds = -(-LAUNCHES // len(self.weights))
        launch(self.weights[0])
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(rounds):
                for weight in self.weights:
                    launch(weight)
        graph.replay()
        taken = []
        for _ in range(10):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            taken.append(1000 * start.elapsed_time(end) / (rounds * len(self.weights)))
        return statistics.median(taken)


def measure(shape: Shape, options: argparse.Namespace) -> tuple[list[str], Config | None]:
    """A row of the report, and what is worth an entry in TUNED."""
    bench = Bench(shape, getattr(torch, options.dtype), not options.no_pdl)
    configs = list(candidates(shape))
    # Most of compiling holds no lock. Each thread takes up the CUDA context first.
    with ThreadPoolExecutor(options.threads, initializer=torch.cuda.synchronize) as pool:
        list(pool.map(lambda config: bench.launch(bench.weights[0], config), configs))
    times = {config: bench.time(lambda w, c=config: bench.launch(w, c)) for config in configs}
    by_rule = rule(*shape[:2], shape.gated)
    in_use = configuration(*shape[:2], shape.gated)
    best = min(times, key=times.__getitem__)
    if options.all:
        for config, taken in sorted(times.items(), key=lambda item: item[1]):
            print(f"  {shape} {tuple(config)} {taken:.2f}")
    torch_time = bench.time(lambda w: torch.nn.functional.linear(bench.x, w))
    floor = bench.weights[0].nbytes / options.bandwidth / 1e6
    row = [
        *(str(shape), f"{tuple(best)}", f"{times[best]:.2f}", f"{times[in_use]:.2f}"),
        *(f"{times[by_rule]:.2f}", f"{torch_time:.2f}", f"{floor:.2f}"),
        f"{100 * floor / times[best]:.0f}%",
    ]
    if times[best] > (1 - NOISE) * times[by_rule]:
        return row, None
    return row, best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=[], help="their layers")
    parser.add_argument("--shapes", nargs="+", type=parse_shape, default=[])
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--bandwidth", type=float, default=4.3, help="TB/s, for the floor")
    parser.add_argument("--threads", type=int, default=16, help="that compile")
    parser.add_argument("--no-pdl", action="store_true", help="without dependent launches")
    parser.add_argument("--all", action="store_true", help="print each configuration's time")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a CUDA device")
    names = options.models or ([] if options.shapes else list(MODELS))
    shapes = [*options.shapes, *(shape for name in names for shape in MODELS[name])]
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {options.dtype}, us a launch"
    )
    print("| shape | best (rows, warps, block) | best | table | rule | torch | floor | of floor |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |", flush=True)
    entries = []
    for shape in dict.fromkeys(shapes):
        row, entry = measure(shape, options)
        print(f"| {' | '.join(row)} |", flush=True)
        if entry:
            key = (shape.rows, shape.inputs, shape.gated)
            entries.append(f"    {key}: Config{tuple(entry)},")
    print("\n".join(["", *entries]) if entries else "\nThe rule is as good as anything tried.")


if __name__ == "__main__":
    main()
