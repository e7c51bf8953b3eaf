"""How long sampling takes on the GPU that this runs on, in microseconds.

    sampling.py                                    all of it
    sampling.py --rows 1 256 --vocabularies 151936

In a graph: the kernels of one call, replayed from a CUDA graph, one call behind the other. Eager:
calls of the whole sampler one after the other, as a step with such options makes them; where that
is larger, the host is what takes the time. The floor is the time to read the logits once.

Logits are normal with a deviation of 3, and 32 columns of padding lie behind each row.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch

from ringcast.executor.gpu.sampler import Sampler
from ringcast.kernels.gpu.logprobs import token_logprobs
from ringcast.kernels.gpu.sampling import Draw, draw_scratch, sample_plain
from ringcast.kernels.gpu.top_mask import Cuts, cut_scratch, find_cuts
from ringcast.mq import codec
from ringcast.mq.messages import NewSequence
from ringcast.mq.sampling_params import SamplingParams

OPTIONS = {
    "greedy": SamplingParams(temperature=0.0),
    "temperature": SamplingParams(seed=0),
    "top_k 20, top_p 0.95": SamplingParams(seed=0, temperature=0.6, top_k=20, top_p=0.95),
    "top_p 0.9": SamplingParams(seed=0, top_p=0.9),
    "greedy, penalties": SamplingParams(temperature=0.0, presence_penalty=1.0),
    "greedy, logprobs 5": SamplingParams(temperature=0.0, logprobs=5),
}
KNOWN = 1000  # tokens of each sequence
PADDING = 32
LAUNCHES = 20
device = torch.device("cuda")


class Bench:
    def __init__(self, rows: int, vocab: int, params: SamplingParams, dtype: torch.dtype) -> None:
        self.vocab, self.params = vocab, params
        generator = torch.Generator("cuda").manual_seed(0)
        logits = torch.randn(rows, vocab + PADDING, device=device, generator=generator) * 3
        self.logits = logits.to(dtype)
        self.rows = np.arange(rows, dtype=np.int32)
        self.positions = np.full(rows, KNOWN, np.int32)
        self.rows_N, self.positions_N = (
            torch.from_numpy(array).to(device) for array in (self.rows, self.positions)
        )
        self.out = torch.zeros_like(self.rows_N)
        tokens = torch.randint(0, vocab, (rows, KNOWN + 1), device=device, dtype=torch.int32)
        self.sampler = Sampler(rows, vocab, [0], tokens, device)
        known = codec.pack(tokens[0, :KNOWN].cpu().numpy())
        for row in range(rows):
            self.sampler.enter(NewSequence(row, "", 0, known, KNOWN // 2, 0, b"", params))
        self.sampler.upload()

    def call(self) -> None:
        """As a runner does."""
        if self.sampler.is_plain(self.rows):
            self.sampler.sample_plain(self.logits, self.rows_N, self.positions_N, self.out)
        else:
            arrays = (self.rows, self.positions, self.rows_N, self.positions_N, self.out)
            self.sampler.sample(self.logits, *arrays)

    def kernels(self) -> Callable[[], object] | None:
        """A call's kernels alone, where nothing else is in it."""
        rows, params = len(self.rows), self.params
        draw = Draw(
            torch.full((rows,), params.temperature, device=device),
            torch.zeros(rows, 3, dtype=torch.int32, device=device),
        )
        if params.penalised:
            return None
        scratch = draw_scratch(rows, self.vocab, device)
        arguments = (self.rows_N, self.positions_N, draw, self.out, scratch)
        if params.logprobs is not None:
            return lambda: token_logprobs(
                self.logits, self.rows_N, self.out, params.logprobs, vocab_size=self.vocab
            )
        if params.top_p == 1.0:
            return lambda: sample_plain(self.logits, *arguments, vocab_size=self.vocab, pdl=True)
        cuts = Cuts(
            torch.full((rows,), params.top_k, dtype=torch.int32, device=device),
            torch.full((rows,), params.top_p, dtype=torch.float64, device=device),
            torch.zeros(rows, device=device),
        )
        room = cut_scratch(rows, self.vocab, device)

        def sample_cut() -> None:
            kept = find_cuts(self.logits, self.rows_N, draw, cuts, room, vocab_size=self.vocab)
            sample_plain(self.logits, *arguments, vocab_size=self.vocab, kept=kept)

        return sample_cut


def time_graph(launch: Callable[[], object]) -> float:
    """The median of ten replays."""
    launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(LAUNCHES):
            launch()
    graph.replay()
    taken = []
    for _ in range(10):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        taken.append(1000 * start.elapsed_time(end) / LAUNCHES)
    return statistics.median(taken)


def time_calls(call: Callable[[], object]) -> float:
    call()
    torch.cuda.synchronize()
    taken = []
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(LAUNCHES):
            call()
        torch.cuda.synchronize()
        taken.append(1e6 * (time.perf_counter() - start) / LAUNCHES)
    return statistics.median(taken)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 64, 256])
    parser.add_argument("--vocabularies", nargs="+", type=int, default=[151936, 128256])
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--bandwidth", type=float, default=4.3, help="TB/s, for the floor")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a CUDA device")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {options.dtype}, us a call")
    print("| options | rows | vocabulary | in a graph | eager | floor |")
    print("| --- | --- | --- | --- | --- | --- |", flush=True)
    for vocab in options.vocabularies:
        for rows in options.rows:
            for name, params in OPTIONS.items():
                bench = Bench(rows, vocab, params, getattr(torch, options.dtype))
                kernels = bench.kernels()
                alone = f"{time_graph(kernels):.1f}" if kernels else ""
                floor = rows * vocab * bench.logits.itemsize / options.bandwidth / 1e6
                row = (name, str(rows), str(vocab), alone, f"{time_calls(bench.call):.1f}")
                print(f"| {' | '.join(row)} | {floor:.1f} |", flush=True)


if __name__ == "__main__":
    main()
