"""Experts that are dealt to two GPUs, beside experts that are split: how long a decode step takes
through LLM, and what replicas that step together spend on each other.

    expert_parallel.py                       all of it, in --limit seconds
    expert_parallel.py --what exchanges      rows to all and sums back, microseconds in graphs
    expert_parallel.py --what meeting        the host's part of a step, microseconds
    expert_parallel.py --what tp tp+ep dp+ep one       engines; one: a single GPU
    expert_parallel.py --what tp+dp+ep                 likewise, on four
    expert_parallel.py --what tp+eplb dp+eplb          those whose experts are placed all the time

The model has Qwen3-30B-A3B's shapes and random weights. A step's time is the difference between
generating many tokens and few, over their number; with two replicas each has half of the batch, so
"batch 1" has one that only runs dummy steps. Each part is in processes of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve()
CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "torch_dtype": "bfloat16",
    "eos_token_id": 151645,
}
ENGINES: dict[str, dict[str, Any]] = {
    "one": {},
    "tp": {"tensor_parallel_size": 2},
    "tp+ep": {"tensor_parallel_size": 2, "enable_expert_parallel": True},
    "dp+ep": {"data_parallel_size": 2, "enable_expert_parallel": True},
    "tp+dp+ep": {
        "tensor_parallel_size": 2,
        "data_parallel_size": 2,
        "enable_expert_parallel": True,
    },
}
BALANCED = {
    "enable_eplb": True,
    "eplb_config": {"window_size": 100, "step_interval": 100, "num_redundant_experts": 16},
}
ENGINES |= {f"{name}lb": ENGINES[name] | BALANCED for name in ("tp+ep", "dp+ep")}
DEFAULT = ["exchanges", "meeting", "tp", "tp+ep", "dp+ep"]
BATCHES, FEW, MANY, PROMPT = (1, 64, 128), 16, 144, 64
ROWS = (1, 8, 32, 64, 128, 512, 1024, 2048)
PAIRS, REPLAYS, MEETINGS = 20, 20, 1000


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--what", nargs="+", choices=[*DEFAULT[:2], *ENGINES], default=DEFAULT)
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--limit", type=float, default=98, help="seconds, of all parts together")
    parser.add_argument("--part", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.part:
        run_part(*args.part)
        return
    end = time.monotonic() + args.limit
    with tempfile.TemporaryDirectory() as folder:
        config = CONFIG | {"num_hidden_layers": args.layers}
        (Path(folder) / "config.json").write_text(json.dumps(config))
        for what in args.what:
            if what in ENGINES:
                run_processes([[what, folder]], end)
            else:
                run_processes([[what, str(rank)] for rank in range(2)], end)


def run_processes(parts: list[list[str]], end: float) -> None:
    """All parts at once, until they have ended or it is time."""
    memory_fd, start = os.memfd_create("ranks"), time.monotonic()
    processes = [
        subprocess.Popen(
            [sys.executable, "-P", str(HERE), "--part", *part, str(memory_fd)],
            pass_fds=[memory_fd],
        )
        for part in parts
    ]
    os.close(memory_fd)
    try:
        status = [process.wait(max(1.0, end - time.monotonic())) for process in processes]
        took = f"{time.monotonic() - start:.1f} s"
        print(f"{parts[0][0]}: ended with {status} after {took}", flush=True)
    except subprocess.TimeoutExpired:
        print(f"{parts[0][0]}: not done in time", flush=True)
    finally:
        for process in processes:
            process.terminate()  # an engine ends its actors
        for process in processes:
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def run_part(what: str, place: str, memory_fd: str) -> None:
    if what in ENGINES:
        time_engine(what, place)
    elif what == "meeting":
        time_meetings(int(place), int(memory_fd))
    else:
        time_exchanges(int(place), int(memory_fd))


def time_engine(name: str, folder: str) -> None:
    from ringcast import LLM, SamplingParams

    start = time.monotonic()
    options: dict[str, Any] = {
        "device": "cuda",
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "enable_prefix_caching": False,
        "max_model_len": 1000,
        "max_num_seqs": max(BATCHES),
        "max_num_batched_tokens": 2048,
        "seed": 0,
    }
    with LLM(folder, **options, **ENGINES[name]) as llm:
        print(f"{name}: started after {time.monotonic() - start:.1f} s", flush=True)

        def seconds(batch: int, tokens: int) -> float:
            draw = random.Random(batch * tokens)
            prompts = [
                {"prompt_token_ids": [draw.randrange(1000, 150000) for _ in range(PROMPT)]}
                for _ in range(batch)
            ]
            params = SamplingParams(
                temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False
            )
            begun = time.perf_counter()
            outputs = llm.generate(prompts, [params] * batch, use_tqdm=False)
            spent = time.perf_counter() - begun
            assert all(len(output.outputs[0].token_ids) == tokens for output in outputs)
            return spent

        for batch in BATCHES:
            seconds(batch, FEW)
            few = min(seconds(batch, FEW) for _ in range(2))
            many = min(seconds(batch, MANY) for _ in range(2))
            step = (many - few) / (MANY - FEW)
            rate = batch / step
            print(
                f"{name}, batch {batch}: {1e3 * step:.3f} ms a step, {rate:.0f} tok/s", flush=True
            )


def time_meetings(rank: int, memory_fd: int) -> None:
    from ringcast.executor.gpu.lockstep import Lockstep
    from ringcast.executor.gpu.replicas import Ranks
    from ringcast.mq.messages import WaveStep

    ranks = Ranks(0, 1, rank, 2)
    lockstep = Lockstep(ranks, memory_fd, lambda sequences: sequences, timeout=60)
    took = []
    for step in range(MEETINGS):
        begun = time.perf_counter()
        lockstep.meet(WaveStep(1, step, True), None)
        took.append(time.perf_counter() - begun)
    if not rank:
        took.sort()
        middle, late = (1e6 * took[int(share * MEETINGS)] for share in (0.5, 0.99))
        print(f"a meeting: {middle:.1f} us; one of a hundred {late:.1f} or more", flush=True)
    lockstep.check_alike("their end", None)
    lockstep.leave()


def time_exchanges(rank: int, memory_fd: int) -> None:
    """Of a mixture, in a graph: the norm that writes the rows, rows to all, and the sum with the
    residual add and the next norm. Rank 0 prints.
    """
    import torch

    from ringcast.executor.gpu.parallel import Shape
    from ringcast.executor.gpu.replica_joining import join_devices
    from ringcast.executor.gpu.replicas import Ranks
    from ringcast.kernels.gpu.norm import AddNorm, add_rms_norm, rms_norm

    hidden, device = CONFIG["hidden_size"], torch.device("cuda", rank)
    torch.cuda.set_device(device)
    shape = Shape(max(ROWS), hidden, 0, 0, torch.bfloat16)
    group = join_devices(Ranks(0, 1, rank, 2), memory_fd, shape, device, 60).rows
    stream = torch.cuda.Stream(device)
    weight = torch.ones(hidden, device=device)
    with torch.cuda.stream(stream), torch.inference_mode():
        for rows in ROWS:
            x = torch.randn(rows, hidden, dtype=torch.bfloat16, device=device)
            residual, out, is_short = x.clone(), x.clone(), rows <= group.most_tokens

            def together(residual: Any = residual, out: Any = out, pdl: bool = is_short) -> None:
                mine = group.place_rows(out)
                rms_norm(residual, weight, mine, 1e-6, pdl=pdl)
                group.gather_rows(mine, pdl)
                part = group.own_rows(group.place_all(len(out)))
                group.sum_add_rms_norm(part, AddNorm(residual, weight, out, 1e-6), pdl)

            def alone(x: Any = x, residual: Any = residual, out: Any = out) -> None:
                rms_norm(residual, weight, out, 1e-6, pdl=True)
                add_rms_norm(x, residual, weight, out, 1e-6, pdl=True)

            took = [microseconds(each, stream, is_short) for each in (together, alone)]
            if not rank:
                kind = "" if is_short else " (NCCL, not in a graph)"
                print(
                    f"{rows} rows of {hidden}: {took[0]:.1f} us a mixture with both exchanges, "
                    f"{took[1]:.1f} with its norms alone{kind}",
                    flush=True,
                )
        stream.synchronize()
        group.leave()


def microseconds(launch: Any, stream: Any, in_graph: bool) -> float:
    """Of one of many launches, one behind the other."""
    import torch

    def several() -> None:
        for _ in range(PAIRS):
            launch()

    several()
    stream.synchronize()
    replay = several
    if in_graph:
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(capture_error_mode="thread_local")
        several()
        graph.capture_end()
        replay = graph.replay
    replay()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(REPLAYS):
        replay()
    end.record()
    end.synchronize()
    return 1000 * begin.elapsed_time(end) / PAIRS / REPLAYS


if __name__ == "__main__":
    main()
