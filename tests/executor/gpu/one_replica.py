"""A replica of a model with experts, which it shares with others, without the other actors.

    python -P one_replica.py ENGINE FILE STORE CARRIER ORDER     descriptors of empty files

ORDER is JSON: the model's spec, engine options, and what each replica has to do. Prints a line of
JSON: the tokens, and the runner's details.
"""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import msgspec
import pytest
import torch
from executor.gpu.carriers import join_carrier, leave_carrier, move_always
from executor.gpu.conftest import NUM_BLOCKS, TwoRunners, load, random_tokens, take_few_programs
from executor.gpu.one_rank import Answer, make_store, moved_by, share_one_device
from triton import knobs

from ringcast.executor.gpu.parallel import Shape
from ringcast.executor.gpu.replicas import PeerRows, RowLayout
from ringcast.executor.gpu.runner import GpuModelRunner
from ringcast.mq.config import ModelSpec

DP = {"data_parallel_size": 2, "enable_expert_parallel": True}
MODEL = "mixtral"


class Order(msgspec.Struct, frozen=True):
    """prompts: of each replica. Prompt i of replica n begins in step 3 n + i, comes in chunks, and
    gets `num_tokens` tokens. All have `num_steps` steps, with no rows before the first prompt and
    after the last token.
    """

    spec: ModelSpec
    options: dict[str, Any]
    prompts: list[list[list[int]]]
    num_tokens: int
    num_steps: int
    chunk: int = 16

    def alone(self, kind: type[Any], engine: int, **options: Any) -> list[list[int]]:
        """Of a runner that has all experts."""
        others = ("device", "enforce_eager", "enable_eplb", "eplb_config")
        rest = {k: v for k, v in self.options.items() if k not in others}
        made = load(self.spec, kind, 0, **rest | options)
        return generate(made, self, engine)


def make_order(
    spec: ModelSpec, options: dict[str, Any], lengths: list[list[int]], num_tokens: int
) -> Order:
    """lengths: of each replica's prompts."""
    prompts = [
        [random_tokens(100 * n + i, length) for i, length in enumerate(each)]
        for n, each in enumerate(lengths)
    ]
    chunk = 16
    steps = max(
        3 * n + i + -(-length // chunk) + num_tokens
        for n, each in enumerate(lengths)
        for i, length in enumerate(each)
    )
    return Order(spec, options, prompts, num_tokens, steps + 2, chunk)


def generate(runner: Any, order: Order, engine: int) -> list[list[int]]:
    """With two steps in flight."""
    model = getattr(runner, "_decoder", None) or runner._model
    num_blocks = order.options.get("num_gpu_blocks_override") or NUM_BLOCKS
    s = TwoRunners(runner, None, 16, len(model.groups), num_blocks)
    prompts, left, sent, ended = order.prompts[engine], {}, {}, {}
    for step in range(order.num_steps):
        start = step - 3 * engine
        if 0 <= start < len(prompts):
            s.enter(start, prompts[start])
            left[start], sent[start] = len(prompts[start]), 0
        over = [row for row in sent if row in s.known and sent[row] == order.num_tokens]
        lengths = {
            row: max(1, min(left[row], order.chunk))
            for row in s.known
            if sent[row] < order.num_tokens
        }
        for row, length in lengths.items():
            left[row] -= length
            sent[row] += left[row] <= 0
        pending = s.launch(lengths)
        assert pending.wait(60), "a step is not done after 60 s"
        if step:
            s.read()
        for row in over:  # its last step has been read
            if len(s.known[row]) == len(prompts[row]) + order.num_tokens:
                ended[row] = s.known[row]
                s.remove(row)
    s.read()
    return [ended.get(row) or s.known[row] for row in range(len(prompts))]


def join_on_one_device(engine: int, size: int, store_fd: int, shape: Shape) -> PeerRows:
    """Replicas that share device 0: without long steps, since NCCL refuses that."""
    layout = RowLayout(shape, size, has_long=False)
    memory = share_one_device(make_store(store_fd, size), engine, size, layout.num_bytes)
    return PeerRows(engine, shape, layout, memory)


def run_replicas(order: Order, timeout: float) -> list[Answer]:
    """Each a process. Raises AssertionError with what those that fail have said."""
    files = [os.memfd_create(name) for name in ("replicas", "store", "carrier")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    text = msgspec.json.encode(order).decode()
    processes = []
    try:
        for engine in range(len(order.prompts)):
            command = [sys.executable, "-P", __file__, str(engine), *map(str, files), text]
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
            processes.append(subprocess.Popen(command, pass_fds=files, env=environment, **pipes))
        outputs = [process.communicate(timeout=timeout) for process in processes]
    finally:
        for file in files:
            os.close(file)
        for process in processes:
            process.kill()
            process.communicate()
    errors = [
        f"replica {n} ended with {process.returncode}:\n{said.decode()[-3000:]}"
        for n, (process, (_, said)) in enumerate(zip(processes, outputs, strict=True))
        if process.returncode
    ]
    assert not errors, "\n".join(errors)
    return [msgspec.json.decode(said.splitlines()[-1], type=Answer) for said, _ in outputs]


def main() -> None:
    engine, memory_fd, store_fd, carrier_fd = map(int, sys.argv[1:5])
    order = msgspec.json.decode(sys.argv[5], type=Order)
    size = len(order.prompts)
    device, join = None, None
    if order.options["device"] == "cpu":
        device = torch.device("cpu")
        take_few_programs(pytest.MonkeyPatch())
    elif torch.cuda.device_count() < size:
        device = torch.device("cuda", 0)

        def join(shape: Shape) -> PeerRows:
            return join_on_one_device(engine, size, store_fd, shape)

    carrier = None
    if order.options.get("enable_eplb"):
        move_always()
        if device is not None:
            carrier = join_carrier(engine, size, carrier_fd, device)
    place = (0, device, memory_fd, join, engine, None, carrier)
    runner = load(order.spec, GpuModelRunner, *place, **order.options, **DP)
    compiled: list[str] = []
    knobs.runtime.jit_cache_hook = lambda fn, **_: compiled.append(fn.name)
    tokens = generate(runner, order, engine)
    answer = Answer(tokens, runner.details(), compiled, moved_by(runner))
    runner.leave()
    leave_carrier()
    print(msgspec.json.encode(answer).decode(), flush=True)


if __name__ == "__main__":
    main()
