"""The model runner: what a worker asks of whatever runs its steps, and which ones there are.

A worker launches a step as soon as its plan has come, and reads it when it is done; it may launch
the next ones before. So a device computes without a pause while the host reads, plans and sends. A
processor computes a step where it is launched.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from typing import NamedTuple, Protocol, cast

from ..mq.config import EngineConfig, ModelSpec
from ..mq.errors import ConfigError
from ..mq.messages import StepOutput, StepPlan, WorkerReady

RUNNERS = {
    "cpu": "ringcast.executor.cpu_runner:CpuModelRunner",
    "fake": "ringcast.executor.fake_runner:FakeModelRunner",
    "cuda": "ringcast.executor.gpu.runner:GpuModelRunner",
}

# What a device's runner has of config.quantization beside "none".
QUANTIZES = {"cpu": ("int8", "int4"), "cuda": ("fp8",)}

# What runs pooling models, and the devices that it has.
ENCODER_RUNNER = "ringcast.executor.encoder_runner:EncoderRunner"
ENCODER_DEVICES = ("cpu", "cuda")
_NEUTRAL_IN_POOLING = {
    "kv_cache_dtype": "auto",
    "quantization": "none",
    "deterministic": False,
    "logits_processors": [],
    "num_gpu_blocks_override": None,
    "kv_cache_memory_bytes": None,
    "tensor_parallel_size": 1,
    "enable_expert_parallel": False,
    "pipeline_parallel_size": 1,
}
DETERMINISTIC = ("cpu", "fake")  # devices that keep what config.deterministic promises
PARALLEL = ("cpu", "fake", "cuda")  # devices whose runner can be one of several ranks
PIPELINED = ("cpu", "fake", "cuda")  # those whose runner can be one of several stages

Progress = Callable[[str, int, int], None]

# How often an idle OpenMP thread looks for work before it sleeps: here about 0.2 ms. By default it
# is some 10 ms, in which it takes a core from the other actors; and with more busy threads than
# cores each barrier of a step waits as long.
_SPINS = "4000"


class OtherHosts(NamedTuple):
    """Of an engine on several hosts, or of replicas that step together. num_links: for how many
    mirrors the ranks' memory waits (mirror.py). num_here: workers that are here. address: the
    master's. first: the number of the first worker here, of replicas that step together.
    """

    num_links: int
    num_here: int
    address: str = ""
    first: int = 0


class PendingStep(Protocol):
    """A step that has been launched. What broke it is raised by `done`, `wait` or `read`."""

    def done(self) -> bool:
        """Whether `read` has nothing to wait for. Never waits."""

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it is done, `timeout` seconds at most. Returns whether it is."""

    def read(self) -> StepOutput:
        """What it sampled; waits for it."""


class Done:
    """A step that was over when it had been launched."""

    def __init__(self, output: StepOutput) -> None:
        self._output = output

    def done(self) -> bool:
        return True

    def wait(self, timeout: float | None = None) -> bool:
        return True

    def read(self) -> StepOutput:
        return self._output


class ModelRunner(Protocol):
    """Keeps the batch, the weights and the KV cache of one rank. All ranks get the same plans, and
    config.output_rank knows their outputs. group_fd: memory that only they share. engine: which
    replica this is a rank of (it matters where each has a device of its own).

    `load` comes first and once; it may take seconds and raises ConfigError (ModelLoadError for what
    is wrong with the model's files). `launch` and `execute` apply a plan to the batch and run the
    step; steps run in the order of their calls.
    """

    def __init__(
        self, config: EngineConfig, spec: ModelSpec, rank: int = 0, group_fd: int = -1
    ) -> None: ...

    def load(self, progress: Progress) -> WorkerReady:
        """Load weights, make the KV cache, warm up. `progress(what, done, total)` as it goes."""

    def launch(self, plan: StepPlan) -> PendingStep:
        """Start a step. On a device nothing waits for it, nor for those before it."""

    def execute(self, plan: StepPlan) -> StepOutput:
        """A step and its end."""

    def details(self) -> dict[str, str | int | float]:
        """What was chosen and measured, for people. Valid after `load`."""


class RankRunner(ModelRunner, Protocol):
    """One that can be one of several ranks (PARALLEL)."""

    def leave(self) -> None:
        """After the last step: other ranks that wait for this one get a PeerDeadError."""


class BalancingRunner(RankRunner, Protocol):
    """One that has config.enable_eplb (mq/devices.py)."""

    def notices(self) -> list[str]:
        """What people should know, since the last call."""


def make_runner(
    config: EngineConfig,
    spec: ModelSpec,
    rank: int = 0,
    group_fd: int = -1,
    engine: int = 0,
    others: OtherHosts | None = None,
) -> ModelRunner:
    """The runner of `config.device`, for a rank of a replica. others: with whom it shares the
    engine. Comes before torch is imported, whose OpenMP reads its environment once. Raises
    ConfigError for what the device doesn't have.
    """
    _check_quantization(config)
    if config.deterministic and config.device not in DETERMINISTIC:
        raise ConfigError(
            f"deterministic = True: device {config.device!r} adds up in another order in another "
            f"batch; {', '.join(DETERMINISTIC)} can keep it"
        )
    if config.tensor_parallel_size > 1 and config.device not in PARALLEL:
        raise ConfigError(
            f"tensor_parallel_size = {config.tensor_parallel_size}: device {config.device!r} has "
            f"one worker only; {', '.join(PARALLEL)} can have several"
        )
    if config.pipeline_parallel_size > 1 and config.device not in PIPELINED:
        raise ConfigError(
            f"pipeline_parallel_size = {config.pipeline_parallel_size}: device {config.device!r} "
            f"has one stage only; {', '.join(PIPELINED)} can have several"
        )
    os.environ.setdefault("GOMP_SPINCOUNT", _SPINS)
    try:
        target = RUNNERS[config.device]
    except KeyError:
        raise ConfigError(
            f"device = {config.device!r}: must be one of {', '.join(RUNNERS)}"
        ) from None
    place: dict[str, object] = {"group_fd": group_fd} if config.device in PARALLEL else {}
    if config.device == "cuda" or config.lockstep:
        place["engine"] = engine
    if config.device in ("cpu", "cuda") or (config.device == "fake" and config.lockstep):
        place["others"] = others
    if spec.pooling is not None:
        _check_pooling(config)
        target, place = ENCODER_RUNNER, {"engine": engine}
    module, _, name = target.partition(":")
    kind = getattr(importlib.import_module(module), name)
    return cast(ModelRunner, kind(config, spec, rank, **place))


def _check_quantization(config: EngineConfig) -> None:
    wanted, own = config.quantization, QUANTIZES.get(config.device, ())
    if wanted == "none" or wanted in own:
        return
    others = [device for device, names in QUANTIZES.items() if wanted in names]
    raise ConfigError(
        f"quantization = {wanted!r}: device {config.device!r} has "
        f"{', '.join(map(repr, ('none', *own)))} only; {', '.join(others)} has it"
    )


def _check_pooling(config: EngineConfig) -> None:
    if config.device not in ENCODER_DEVICES:
        raise ConfigError(
            f"device = {config.device!r}: embedding models run on {', '.join(ENCODER_DEVICES)}"
        )
    for option, neutral in _NEUTRAL_IN_POOLING.items():
        if (value := getattr(config, option)) != neutral:
            raise ConfigError(f"{option} = {value!r}: embedding models have {neutral!r} only")
