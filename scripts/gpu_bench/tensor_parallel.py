"""Tensor and pipeline parallelism on the GPUs that this runs on: how long a sum takes, and what
goes from stage to stage.

    tensor_parallel.py sums     # one-shot and NCCL, microseconds in graphs
    tensor_parallel.py pipe     # from stage to stage, microseconds in graphs

Ranks are processes of their own, ended after --limit seconds. layouts.py measures engines.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).resolve()
HIDDEN = 4096
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)  # of 8 KiB
PIPE_TOKENS = (1, 32, 128, 512, 2048, 8192)
IN_GRAPH, REPLAYS = 20, 20


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["sums", "pipe", "rank", "end"])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--limit", type=float, default=180)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--group-fd", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.what == "rank":
        time_sums(args.rank, args.ranks, args.group_fd)
    elif args.what == "end":
        time_pipe(args.rank, args.group_fd)
    elif args.what == "sums":
        in_processes("rank", args.ranks, args.limit)
    else:
        in_processes("end", 2, args.limit)


def in_processes(what: str, ranks: int, limit: float) -> None:
    memory_fd = os.memfd_create("ranks")
    command = [sys.executable, "-P", str(HERE), what, "--ranks", str(ranks)]
    processes = [
        subprocess.Popen(
            [*command, "--rank", str(rank), "--group-fd", str(memory_fd)], pass_fds=[memory_fd]
        )
        for rank in range(ranks)
    ]
    os.close(memory_fd)
    end = time.monotonic() + limit
    try:
        status = [process.wait(max(1.0, end - time.monotonic())) for process in processes]
        print("all ranks ended with", status, flush=True)
    except subprocess.TimeoutExpired:
        print(f"not done after {limit:.0f} s", flush=True)
    finally:
        for process in processes:
            process.kill()
            process.wait()


def time_sums(rank: int, ranks: int, group_fd: int) -> None:
    """One rank. Rank 0 prints."""
    import torch

    from ringcast.executor.gpu import parallel
    from ringcast.kernels.gpu import all_reduce as kernels
    from ringcast.kernels.gpu.norm import AddNorm, add_rms_norm

    # So that every message here is short.
    parallel.MOST_READ = (ranks - 1) * TOKENS[-1] * HIDDEN * 2
    kernels.MOST_PROGRAMS = max(kernels.MOST_PROGRAMS, TOKENS[-1])
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    shape = parallel.Shape(TOKENS[-1], HIDDEN, 64128, 64, torch.bfloat16)
    group = parallel.join_devices(rank, ranks, group_fd, shape, device, 60)
    stream = torch.cuda.Stream(device)
    weight = torch.ones(HIDDEN, device=device)

    with torch.cuda.stream(stream), torch.inference_mode():
        if not rank:
            print(f"{ranks} x {torch.cuda.get_device_name(device)}, torch {torch.__version__}")
            print("KiB       one-shot  one-shot+norm  NCCL  NCCL+norm   (us)", flush=True)
        for tokens in TOKENS:
            update = torch.zeros(tokens, HIDDEN, dtype=torch.bfloat16, device=device)
            residual, out = torch.zeros_like(update), torch.zeros_like(update)

            def short(index: int, update=update, residual=residual) -> None:  # type: ignore[no-untyped-def]
                group.sum(group.place(index % 2, update), residual, residual, pdl=True)

            def short_norm(index: int, update=update, residual=residual, out=out) -> None:  # type: ignore[no-untyped-def]
                part = group.place(index % 2, update)
                group.sum_add_rms_norm(part, AddNorm(residual, weight, out, 1e-6), True)

            def long(index: int, update=update) -> None:  # type: ignore[no-untyped-def]
                group._sum_long(update)

            def long_norm(index: int, update=update, residual=residual, out=out) -> None:  # type: ignore[no-untyped-def]
                group._sum_long(update)
                add_rms_norm(update, residual, weight, out, 1e-6)

            steps = [short, short_norm if tokens <= 1024 else None, long, long_norm]
            took = [f"{microseconds(step):9.1f}" if step else "     none" for step in steps]
            if not rank:
                print(f"{8 * tokens:<8}", *took, flush=True)
        logits = torch.zeros(64, ranks * 64128, dtype=torch.bfloat16, device=device)
        sampled = torch.zeros(64, dtype=torch.int32, device=device)
        for rows in (1, 64):
            whole = None if rank else logits[:rows]
            took_us = microseconds(
                lambda _, rows=rows, whole=whole: group.gather(group.own_logits(rows), whole, True)  # type: ignore[misc]
            )
            if not rank:
                print(f"logits of {rows}: {took_us:.1f} us", flush=True)
        said = microseconds(lambda _: group.broadcast(sampled, True))
        if not rank:
            print(f"tokens: {said:.1f} us", flush=True)
        stream.synchronize()
        group.leave()


def microseconds(step: Callable[[int], None]) -> float:
    """Median of a step's, of IN_GRAPH in a graph, on the current stream."""
    import torch

    stream = torch.cuda.current_stream()
    for index in range(4):
        step(index)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin(capture_error_mode="thread_local")
    for index in range(IN_GRAPH):
        step(index)
    graph.capture_end()
    times = []
    for _ in range(REPLAYS):
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        graph.replay()
        ended.record()
        stream.synchronize()
        times.append(1e3 * began.elapsed_time(ended) / IN_GRAPH)
    return statistics.median(times[3:])


def time_pipe(worker: int, group_fd: int) -> None:
    """One end of it. The receiver prints; items follow each other without a pause."""
    import torch

    from ringcast.executor.gpu import stages
    from ringcast.executor.gpu.parallel import Shape
    from ringcast.kernels.gpu.stage_pipe import Item
    from ringcast.mq.config import EngineConfig, build

    device = torch.device("cuda", worker)
    torch.cuda.set_device(device)
    config = build(EngineConfig, {"device": "cuda", "pipeline_parallel_size": 2})
    shape = Shape(PIPE_TOKENS[-1], HIDDEN, 64, 64, torch.bfloat16)
    stage = stages.join_devices(config, worker, group_fd, shape, device).stage
    stage.open()
    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream), torch.inference_mode():
        if worker:
            print(f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}", flush=True)
        for tokens in PIPE_TOKENS:
            x = torch.zeros(tokens, HIDDEN, dtype=torch.bfloat16, device=device)

            def item(_: int, x=x) -> None:  # type: ignore[no-untyped-def]
                if worker:
                    stage.receive(x, True)
                else:
                    stage.send(Item(x, x, None, 1e-6), True)

            took = microseconds(item)
            if worker:
                rate = x.nbytes / took / 1e3
                print(f"{tokens:5} rows: {took:8.1f} us an item, {rate:6.1f} GB/s", flush=True)
        stream.synchronize()
        stage.leave()


if __name__ == "__main__":
    main()
