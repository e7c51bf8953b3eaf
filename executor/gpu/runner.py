"""The model runner on a CUDA device: batch, model, cache and sampler of one rank, and the steps
that they make together.

`launch` writes a step's inputs into pinned memory and enqueues all of the step on one stream: the
copy over, the forward pass (mostly a graph), sampling, the copy back, an event. It never
waits for the device, so steps follow each other there without a pause. Tokens are read when the
event has passed.

A rank of several runs its part of each step, and gets the tokens that rank 0 samples on the device
(parallel.py, hosts.py). It copies them back, too: so no rank is ahead of its own steps. Replicas
that share experts meet before each launch (lockstep.py). A stage of several (stages.py) ends its
steps where the next stage's begin, and answers no tokens before the last one.

Everything runs on that one stream, eager steps, graphs and their capture alike, so buffers are
shared and nothing needs another event. On the CPU, which has neither streams nor pinned memory,
each step is over when it is launched; the kernels run under Triton's interpreter, for tests.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from ...kernels.gpu.blocks import copy_blocks
from ...mq import codec
from ...mq.config import EngineConfig, ModelSpec
from ...mq.messages import StepOutput, StepPlan, WorkerReady
from ..logits_processor import load_processors
from ..models import find_model
from ..runner import Done, OtherHosts, PendingStep, Progress
from ..stages import Position
from ..weights import DummyWeights, SafetensorsWeights, WeightSource
from . import joining, memory, replica_joining
from .attention import decode_config
from .batch import GpuBatch, Slot, Step
from .compile_ahead import CompileServer, compile_variants, prepare_folder
from .decoder import GpuDecoder
from .description import describe
from .device_experts import Carrier, GroupCarrier
from .devices import check_split
from .expert_watch import ExpertWatch
from .graphs import at_least, batch_sizes
from .hosts import device_here
from .lockstep import Lockstep
from .parallel import Alone, AnySampler, DeviceGroup, PeerGroup, Shape, make_sampler
from .pending import GpuPending
from .prompt_logprobs import PromptLogprobsReader
from .replicas import Ranks, RowGroup
from .sampler import Sampler
from .schemes import choose_cache_dtype, choose_dtype, choose_scheme
from .stages import GpuStage, NoSampler, Place
from .step_launcher import StepLauncher
from .stopwatch import Stopwatch
from .warm_up import WarmUp

log = logging.getLogger(__name__)


class GpuModelRunner:
    """rank: the worker's number. device, join, join_stages (joining.py, replica_joining.py) and
    carrier (device_experts.py): if not its own. others: as make_runner has them.
    """

    def __init__(
        self,
        config: EngineConfig,
        spec: ModelSpec,
        rank: int = 0,
        device: torch.device | None = None,
        group_fd: int = -1,
        join: Callable[[Shape], Any] | None = None,
        engine: int = 0,
        join_stages: Callable[[Shape], Place] | None = None,
        others: OtherHosts | None = None,
        carrier: Carrier | None = None,
    ) -> None:
        self._config, self._spec, self._worker, self._engine = config, spec, rank, engine
        self._size, self._group_fd = config.tensor_parallel_size, group_fd
        self._others = others or OtherHosts(0, config.num_workers * config.data_parallel_size)
        stage, self._rank = divmod(rank, self._size)
        self._position = Position(stage, config.pipeline_parallel_size)
        self._group: DeviceGroup | Alone = Alone()
        self._join = join or self._join_group
        self._rows: RowGroup | None = None
        self._lockstep: Lockstep | None = None
        self._stage = GpuStage(self._position)
        self._hosts = None if config.lockstep else others
        self._device = device or device_here(config, rank, engine, others)
        place = {"device": self._device, "others": self._hosts}
        join_own = partial(joining.join_stages, config, rank, group_fd, **place)
        self._join_stages = join_stages or join_own
        self._carrier = carrier or GroupCarrier()
        self._on_gpu = self._device.type == "cuda"
        self._stream: torch.cuda.Stream | None = None
        self._kernels: dict[str, int] = {}  # variants that steps need, and how many were compiled
        self._details: dict[str, str | int | float] = {}

    # --- start-up

    @torch.inference_mode()
    def load(self, progress: Progress) -> WorkerReady:
        """Raises ModelLoadError for what is wrong with the model, ConfigError if it doesn't fit."""
        watch = Stopwatch()
        with contextlib.ExitStack() as stack:
            server = None
            if self._on_gpu:  # at once: its imports take as long as all before the kernels
                server = stack.enter_context(CompileServer(prepare_folder()))
                torch.cuda.set_device(self._device)
                self._stream = torch.cuda.Stream(self._device)
            stack.enter_context(torch.cuda.stream(self._stream))
            return self._load(progress, server, watch)

    def _load(
        self, progress: Progress, server: CompileServer | None, watch: Stopwatch
    ) -> WorkerReady:
        meter, c = memory.Meter(self._device), self._config
        if c.num_gpu_blocks_override is None and c.kv_cache_memory_bytes is None:
            meter.check_share(c.gpu_memory_utilization)
        with memory.room_for("weights"):
            self._load_weights(progress)
        weights = meter.settle()
        watch.lap("load")
        with memory.room_for("activations"):
            self._make_buffers()
            self._decoder.set_cache(1)
            programmatic = self._uses_graphs and self._exchange.programmatic
            parts = self._batch, self._decoder, self._sampler
            warm_up = WarmUp(*parts, self._launcher.bounds_of, programmatic)
            if server is not None:
                tell = partial(progress, "compiling kernels")
                self._kernels = compile_variants(server, warm_up.variants, tell)
                watch.lap("compile")
                warm_up.run(lambda n, of: progress("warming up", n, of))
        self._stage.open()
        activations = meter.used() - weights
        watch.lap("warm_up")
        with memory.room_for("graphs"):
            graphs = self._measure_graphs(meter)
        terms = memory.Terms(meter.total, meter.others, weights, activations, graphs)
        ready = self._make_cache(terms, warm_up)
        if self._uses_graphs:
            self._capture(progress)
        watch.lap("capture")
        self._describe(terms, ready.num_blocks, watch.seconds)
        return ready

    @property
    def _exchange(self) -> RowGroup | DeviceGroup | Alone:
        """With whom this one has a step in common, launch by launch."""
        return self._rows or self._group

    @property
    def _uses_graphs(self) -> bool:
        return self._on_gpu and not self._config.enforce_eager

    def _load_weights(self, progress: Progress) -> None:
        config, spec = self._config, self._spec
        self._dtype = choose_dtype(config.dtype)
        source: WeightSource
        if config.load_format == "dummy":
            source = DummyWeights(config.seed or 0, self._device)
        else:
            source = SafetensorsWeights(spec.path)
        model = find_model(spec.architecture).check(spec.hf_config)
        self._scheme = choose_scheme(config, model.quantization, self._dtype, self._device)
        check_split(self._size, self._scheme, config.lockstep)
        dealt = Ranks.of(config, self._rank, self._engine).dealt if config.lockstep else None
        self._decoder = GpuDecoder(
            model,
            self._dtype,
            config.block_size,
            source,
            self._device,
            lambda n, total: progress("loading weights", n, total),
            self._scheme,
            choose_cache_dtype(config, self._dtype, self._device),
            self._rank,
            self._size,
            config.enable_expert_parallel,
            dealt,
            self._position,
            config.eplb_config.num_redundant_experts,
        )

    def _make_buffers(self) -> None:
        config, spec = self._config, self._spec
        sizes = batch_sizes(max(config.max_num_seqs, 2))
        self._batch = GpuBatch(
            max_num_seqs=config.max_num_seqs,
            max_tokens=max(config.max_num_batched_tokens, config.max_num_seqs),
            max_model_len=spec.max_model_len,
            block_size=config.block_size,
            num_groups=len(self._decoder.groups),
            num_slots=config.most_steps_in_flight + 1,
            pad=partial(at_least, sizes),
            windows=sorted(set(self._decoder.config.windows)),
            decode=decode_config(self._decoder.config, self._decoder.cache_dtype, self._device),
            device=self._device,
        )
        c, batch = self._decoder.config, self._batch
        shape = Shape(batch.max_tokens, c.hidden_size, c.vocab_size, batch.capacity, self._dtype)
        if config.lockstep:
            ranks, links = Ranks.of(config, self._rank, self._engine), self._others.num_links
            timeout = config.startup_timeout
            self._lockstep = Lockstep(ranks, self._group_fd, batch.pad, timeout, links)
            self._group, self._rows = self._join(shape)
            self._rows.num_tokens_N = batch.num_tokens(self._rows.size)
        elif self._position.count > 1 or self._hosts is not None:
            self._group, self._stage = self._join_stages(shape)
            self._stage.bind(batch)
        elif self._size > 1:
            self._group = self._join(shape)
        self._decoder.bind(batch, spec.max_model_len, self._group, self._rows, self._stage)
        self._sampler: AnySampler | NoSampler = NoSampler()
        if self._stage.is_last:
            self._sampler = make_sampler(self._make_sampler, self._group)
        parts = batch, self._decoder, self._sampler, self._stage, self._exchange
        alike = self._rows is not None and self._rows.alike
        self._launcher = StepLauncher(*parts, sizes, spec.max_model_len, alike)
        self._prompt_logprobs = PromptLogprobsReader(batch, self._prompt_logits, spec.vocab_size)
        speaks = self._stage.is_last and not (self._rank or (config.lockstep and self._engine))
        self._experts = ExpertWatch(config, self._decoder.mixtures, speaks, self._carrier)

    def _join_group(self, shape: Shape) -> PeerGroup | replica_joining.Joined:
        if self._lockstep is not None:
            return replica_joining.join(self._lockstep, shape, self._device, self._others)
        return joining.join(self._config, self._rank, self._group_fd, shape, self._device)

    def _make_sampler(self) -> Sampler:
        spec = self._spec
        return Sampler(
            self._batch.capacity,
            spec.vocab_size,
            spec.eos_token_ids,
            self._batch.tokens_RL,
            self._device,
            load_processors(self._config, spec),
        )

    def _prompt_logits(self, index: torch.Tensor) -> torch.Tensor | None:
        logits = self._launcher.logits(index)
        return None if self._rank else logits

    def _measure_graphs(self, meter: memory.Meter) -> int:
        """Bytes that all graphs will take."""
        if not self._uses_graphs or self._stream is None:
            return 0
        return self._launcher.measure_graphs(self._stream, meter.used)

    def _make_cache(self, terms: memory.Terms, warm_up: WarmUp) -> WorkerReady:
        config, spec = self._config, self._spec
        groups = tuple(group.spec for group in self._decoder.groups)
        num_blocks = memory.num_blocks(
            config, groups, spec.max_model_len, self._decoder.block_bytes, terms
        )
        with memory.room_for("KV cache"):
            self._decoder.set_cache(num_blocks)
        if self._on_gpu:
            warm_up.copy_nothing()
        return WorkerReady(self._worker, num_blocks, config.block_size, groups)

    def _capture(self, progress: Progress) -> None:
        assert self._stream is not None
        graphs, mixed = self._launcher.plan_graphs()
        if self._lockstep is not None:
            self._lockstep.check_alike("graphs", (list(graphs.kinds()), mixed.kinds()))
            self._lockstep.counts = mixed.counts
        tell = partial(progress, "capturing graphs")
        with memory.room_for("graphs"):
            self._launcher.capture(graphs, mixed, self._stream, tell)

    def _describe(self, terms: memory.Terms, num_blocks: int, seconds: dict[str, float]) -> None:
        types = self._dtype, str(self._scheme or "none")
        parts = self._config, self._device, self._decoder
        told = describe(*parts, *types, terms, num_blocks, self._launcher.num_graphs)
        self._details = {**told, **self._kernels, **seconds}
        log.info("memory of %s: %s", self._device, told["memory"])

    def details(self) -> dict[str, str | int | float]:
        return self._details

    def notices(self) -> list[str]:
        return self._experts.notices()

    def leave(self) -> None:
        with torch.cuda.stream(self._stream):
            self._exchange.leave()
            self._stage.leave()
        if self._lockstep is not None:
            self._lockstep.leave()

    # --- steps

    def execute(self, plan: StepPlan) -> StepOutput:
        return self.launch(plan).read()

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> PendingStep:
        start = time.perf_counter()
        batch = self._batch
        self._stage.before(plan)
        batch.apply(plan)
        for new in plan.new:
            self._sampler.enter(new)
            self._prompt_logprobs.enter(new)
        rows, lengths = codec.ints(plan.rows), codec.ints(plan.num_tokens)
        asks = len(rows) > 0 and self._prompt_logprobs.asks(rows)
        step = batch.lay_out(rows, lengths, whole=asks) if len(rows) else None
        any_work = False
        if self._lockstep is not None:
            step, any_work = self._lockstep.meet(plan.wave, step)
        if step is None and not (plan.copy_to or batch.is_changed or self._experts.has_news):
            seconds = time.perf_counter() - start
            return Done(StepOutput(plan.step, b"", b"", None, seconds, any_work=any_work))
        if step is not None:
            self._stage.laid_out(step.sampled)
        slot = batch.take_slot()
        answered = step if self._stage.is_last else None
        pending = GpuPending(plan.step, slot, answered, self._stage.sampled, any_work)
        with torch.cuda.stream(self._stream):
            self._enqueue(plan, step, pending, slot, asks)
        slot.release = pending.settle
        return pending

    def _enqueue(
        self, plan: StepPlan, step: Step | None, pending: GpuPending, slot: Slot, asks: bool
    ) -> None:
        batch = self._batch
        pending.begin()
        if step is not None:
            batch.turn = self._experts.before_step()
        batch.fill(slot, step)
        prefill = self._launcher.lay_out(slot, step)
        copies = [slot.put(codec.ints(ids)) for ids in (plan.copy_from, plan.copy_to)]
        num_copies = len(plan.copy_to) // 4
        batch.send(slot)
        self._sampler.upload()
        if num_copies:
            copy_blocks(self._decoder.cache, *(batch.view(place, num_copies) for place in copies))
        if step is None:
            batch.apply_changes()
        else:
            self._launcher.launch(step, prefill, pending)
            if self._stage.is_last:
                if asks:
                    pending.prompts = self._prompt_logprobs.launch(step)
                count = len(step.sampled)
                slot.outputs[:count].copy_(batch.sampled_N[:count], non_blocking=True)
        pending.experts = self._experts.after_step(step is not None)
        pending.end()
