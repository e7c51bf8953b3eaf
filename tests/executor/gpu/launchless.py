"""Triton's compiler without a device: a driver that says what would be there. Run as a process of
its own, since tests here may have Triton interpret.

    python launchless.py steps FOLDER      every step's variants are among those collected
    python launchless.py compile FOLDER    a server compiles, and Triton finds what it has made;
                                           what it can't compile is named
    python launchless.py order FOLDER      an order for a server, with what takes long

FOLDER is for compiled kernels. Prints a line of JSON. What launches a variant is not compiled here:
that needs the driver's library.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import torch
from executor.gpu.conftest import GREEDY, MODELS, NUM_BLOCKS, TwoRunners, make_model, random_tokens
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from ringcast.executor.gpu import compile_ahead, nccl, parallel
from ringcast.executor.gpu import runner as runner_module
from ringcast.executor.gpu.batch import Step
from ringcast.executor.gpu.compile_ahead import CompileServer, Job, Order, jobs_of
from ringcast.executor.gpu.graphs import LARGEST
from ringcast.executor.gpu.lockstep import DECODE, MIXED, NOTHING, agree, fit, words_of
from ringcast.executor.gpu.nccl_group import NcclGroup, NcclPipe
from ringcast.executor.gpu.parallel import Alone, Shape
from ringcast.executor.gpu.replicas import Ranks
from ringcast.executor.gpu.runner import GpuModelRunner
from ringcast.executor.gpu.stages import GpuStage, Place
from ringcast.executor.gpu.variants import Variant, collect
from ringcast.executor.gpu.warm_up import WarmUp
from ringcast.executor.runner import OtherHosts
from ringcast.executor.stages import Position
from ringcast.kernels.gpu.embedding import _embed_kernel
from ringcast.kernels.gpu.top_mask import _range_kernel
from ringcast.mq.config import EngineConfig, build
from ringcast.mq.sampling_params import SamplingParams

CPU = torch.device("cpu")
TARGET = GPUTarget("cuda", 90, 32)
OPTIONS: list[SamplingParams] = [
    GREEDY,
    SamplingParams(temperature=1.0, seed=5),
    SamplingParams(temperature=1.0, seed=6, top_p=0.9),
    SamplingParams(temperature=1.0, seed=6, top_k=3, logprobs=2),
    SamplingParams(temperature=1.0, seed=6, min_p=0.1, prompt_logprobs=1),
    SamplingParams(temperature=0.0, repetition_penalty=1.3, logprobs=20),
    SamplingParams(temperature=0.7, seed=1, frequency_penalty=0.3, top_k=9),
    SamplingParams(temperature=0.0, logit_bias={3: 2.0}, prompt_logprobs=0),
    SamplingParams(temperature=0.0, allowed_token_ids=[3, 4], logprobs=0),
    SamplingParams(temperature=1.0, seed=2, bad_words=[], min_tokens=3, stop_token_ids=[7]),
]


def without_device() -> None:
    device = {
        "get_current_device": lambda: 0,
        "get_current_stream": lambda device: 0,
        "get_current_target": lambda: TARGET,
        "utils": None,
    }
    driver.set_active(SimpleNamespace(**device))


class LoneLockstep:
    """Of a replica whose other one has, step by step, what OTHERS says (words_of)."""

    host = None

    OTHERS = ((NOTHING, 0, 0, 0), (DECODE, 3, 4, 5), (MIXED, 33, 48, 0), (DECODE, 1, 1, 9))

    def __init__(
        self,
        ranks: Ranks,
        memory_fd: int,
        pad: Callable[[int], int],
        timeout: float,
        num_links: int,
    ) -> None:
        self.ranks, self.timeout, self._file, self._pad = ranks, timeout, memory_fd, pad
        self._others = itertools.cycle(self.OTHERS)

    def share_file(self, owner: int) -> int:
        return self._file

    def check_rows(self, dtype: torch.dtype, hidden: int) -> None:
        pass

    def meet(self, place: object, step: Step | None) -> tuple[Step | None, bool]:
        agreed = agree(np.array([words_of(step), next(self._others)], np.int32), [])
        return None if agreed is None else fit(step, agreed, self._pad), True


def do_nothing(*tensors: torch.Tensor) -> None:
    pass


class LoneRanks:
    """A Communicator whose other ranks are on another host, and not there."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def all_reduce(self, x: torch.Tensor) -> None:
        pass

    def broadcast(self, x: torch.Tensor) -> None:
        pass

    def send(self, x: torch.Tensor, peer: int) -> None:
        pass

    def receive(self, x: torch.Tensor, peer: int) -> None:
        pass

    def together(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


def join_lone_hosts(config: EngineConfig, worker: int, shape: Shape) -> Place:
    """Each worker is on a host of its own."""
    size, stages, device = config.tensor_parallel_size, config.pipeline_parallel_size, CPU
    number, rank = divmod(worker, size)
    group = NcclGroup(LoneRanks(rank, size), shape, device) if size > 1 else Alone()
    column, position = LoneRanks(number, stages), Position(number, stages)
    inlet = None if position.is_first else NcclPipe(column, number - 1, shape, device)
    outlet = None if position.is_last else NcclPipe(column, number + 1, shape, device)
    return Place(group, GpuStage(position, inlet, outlet))


class NoGraphs:
    """Finds a graph where a device has one; to replay it launches nothing that isn't known."""

    def find(self, size: int, bound: int, whole: bool) -> NoGraphs | None:
        return self if size <= LARGEST else None

    def replay(self) -> None:
        pass


@torch.inference_mode()
def make_runner(
    name: str,
    folder: Path,
    graphs: bool = True,
    worker: int = 0,
    size: int = 1,
    others: OtherHosts | None = None,
    hosts: bool = False,
    **more: Any,
) -> tuple[GpuModelRunner, WarmUp]:
    """Loaded up to its first launches. Of several workers or replicas, it is the only one that is
    there. hosts: each of these has a host of its own.
    """
    options = {
        "device": "cuda",
        "block_size": 16,
        "max_num_seqs": 40,
        "max_num_batched_tokens": 128,
        "num_gpu_blocks_override": NUM_BLOCKS,
        "tensor_parallel_size": size,
        **more,
    }
    spec = make_model(folder / name, name)
    memory_fd = os.memfd_create("ranks")
    config = build(EngineConfig, options)
    place: dict[str, Any] = {"others": others}
    if hosts:
        place["others"] = OtherHosts(0, 1)
        place["join_stages"] = partial(join_lone_hosts, config, worker)
    runner = GpuModelRunner(config, spec, worker, CPU, memory_fd, **place)
    runner._load_weights(lambda *_: None)
    runner._make_buffers()
    runner._stage._tokens = None  # nobody tells, and nobody hears
    os.close(memory_fd)
    runner._decoder.set_cache(NUM_BLOCKS)
    runner._launcher.graphs = NoGraphs() if graphs else None
    parts = (runner._batch, runner._decoder, runner._sampler)
    programmatic = graphs and runner._exchange.programmatic
    return runner, WarmUp(*parts, runner._launcher.bounds_of, programmatic)


def steps_of(runner: GpuModelRunner) -> None:
    """Prompts of many lengths that begin one after the other, with all options, and a fork."""
    s = TwoRunners(runner, None, 16, len(runner._decoder.groups), 100_000)
    options = itertools.cycle(OPTIONS)
    for row, length in enumerate((1, 2, 15, 16, 17, 40, 3, 100, 5, 33, 1, 1)):
        s.enter(row, random_tokens(row, length), params=next(options))
        s.run(dict.fromkeys(range(row), 1) | {row: length})
    for rows in (1, 2, 3, 5, 8, 9, 12):
        s.run(dict.fromkeys(range(rows), 1))
    s.copy(s.blocks[7][0])
    s.run({7: 1})
    for row in range(12, 40):
        s.enter(row, random_tokens(row, 2), params=OPTIONS[row % 3])
    s.run(dict.fromkeys(range(12, 40), 2))
    s.run(dict.fromkeys(range(40), 1))
    for row in range(40):
        s.remove(row)
    s.launch({})


@torch.inference_mode()
def graphs_of(runner: GpuModelRunner) -> None:
    launcher = runner._launcher
    for kind in launcher.plan_graphs()[0].kinds():
        launcher.run_decode(*kind)


def check_steps(folder: Path) -> dict[str, Any]:
    report = {}
    names = (*MODELS, "qwen3 experts", "mixtral")
    alone = [(name, graphs, 0, 1, {}) for name in names for graphs in (True, False)]
    ranks = [("qwen3", True, 0, 2, {}), ("gemma3", False, 0, 2, {}), ("llama", True, 1, 2, {})]
    dealt = {"enable_expert_parallel": True}
    ranks += [("mixtral", True, 0, 2, dealt), ("mixtral", False, 1, 2, {})]
    shared = dealt | {"data_parallel_size": 2}
    ranks += [("mixtral", True, 0, 1, shared), ("qwen3 experts of 4", False, 0, 1, shared)]
    ranks += [("mixtral", True, 1, 2, shared)]
    elsewhere = [shared | {"others": OtherHosts(0, size, "host")} for size in (1, 2)]
    ranks += [("mixtral", True, 0, 1, elsewhere[0]), ("mixtral", True, 0, 2, elsewhere[1])]
    ranks += [("gemma3", True, 1, 1, {"pipeline_parallel_size": 3})]
    hosts = {"hosts": True}
    ranks += [("gemma3", True, 1, 1, {"pipeline_parallel_size": 3} | hosts)]
    ranks += [("qwen3", True, rank, 2, hosts) for rank in (0, 1)]
    for name, graphs, worker, size, more in alone + ranks:
        runner, warm_up = make_runner(name, folder, graphs, worker, size, **more)
        with torch.inference_mode():
            known = {variant.data for variant in warm_up.variants()}
        runner._stage.open()
        with collect() as found:
            steps_of(runner)
            if graphs:
                graphs_of(runner)
        new = sorted({v.name for data, v in found.items() if data not in known})
        report[f"{name} {graphs} {worker} of {size} {more}"] = {
            "known": len(known),
            "used": len(found),
            "new": new,
        }
    return report


def variants_of(folder: Path, *kernels: str) -> list[Variant]:
    _, warm_up = make_runner("llama", folder)
    with torch.inference_mode():
        variants = warm_up.variants()
    return [variant for variant in variants if variant.name.endswith(kernels)]


def small_variants(folder: Path) -> list[Variant]:
    """Those compile within a moment."""
    short = ("_range_kernel", "_embed_kernel", "_append_tokens_kernel")
    return variants_of(folder, *short)


def without_launchers(variants: list[Variant]) -> list[Job]:
    return [msgspec.structs.replace(job, launcher=False) for job in jobs_of(variants)]


def compile_all(folder: Path, variants: Callable[[], list[Variant]]) -> tuple[Any, ...]:
    progress: list[tuple[int, int]] = []
    with CompileServer(folder) as server:
        known, missing, errors = server.compile_missing(
            variants, lambda *step: progress.append(step)
        )
    return known, missing, [error[:300] for error in errors], progress[-1:]


def check_compile(folder: Path) -> dict[str, Any]:
    _ = _range_kernel.cache_key  # of what it calls nothing has a digest yet
    variants = small_variants(folder)
    first, second = (compile_all(folder, lambda: variants) for _ in range(2))
    hits: list[bool] = []
    knobs.compilation.listener = lambda **event: hits.append(event["cache_hit"])
    runner, _ = make_runner("llama", folder)
    batch = runner._batch
    for size in (4, 8):
        # As a step does it: Triton itself makes the source and the options that it looks for.
        table, out = runner._decoder._table, runner._decoder._residual_TH[:size]
        _embed_kernel.run(
            batch.token_ids_T[:size], table, out, table.stride(0), out.stride(0), table.shape[0],
            table.shape[1], 0, runner._decoder._scale,
            BLOCK=32, PDL=True, num_warps=4, launch_pdl=True, grid=(size, 1), warmup=True,
        )  # fmt: skip
    third = compile_all(folder, lambda: [bad(variants[0]), *variants])
    return {"first": first, "second": second, "third": third, "hits": hits}


def bad(good: Variant) -> Variant:
    data = json.loads(good.data)
    data["signature"] = dict.fromkeys(data["signature"], "constexpr")
    return Variant("bad", json.dumps(data))


def make_order(folder: Path) -> Any:
    jobs = without_launchers(variants_of(folder, "_draw_kernel", "_decode_kernel"))
    return msgspec.to_builtins(Order((TARGET.backend, TARGET.arch, TARGET.warp_size), 2, jobs))


def main() -> None:
    what, folder = sys.argv[1], Path(sys.argv[2])
    runner_module.Lockstep = LoneLockstep
    parallel.join_devices = lambda *place: parallel.join_processes(*place[:4])
    nccl.prepare = lambda address: None
    nccl.connect = lambda *place: SimpleNamespace(all_gather=do_nothing, reduce_scatter=do_nothing)
    compile_ahead.jobs_of = without_launchers
    os.environ["TRITON_CACHE_DIR"] = str(folder)
    without_device()
    checks = {"steps": check_steps, "compile": check_compile, "order": make_order}
    print(json.dumps(checks[what](folder)))


if __name__ == "__main__":
    main()
