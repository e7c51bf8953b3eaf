"""The model runner on a CUDA device: batch, model, cache and sampler of one rank, and the steps
that they make together.

`launch` writes a step's inputs into pinned memory and enqueues all of the step on one stream: the
copy over, the forward pass (a graph for a decode step), sampling, the copy back, an event. It never
waits for the device, so steps follow each other there without a pause. Tokens are read when the
event has passed.

Everything runs on that one stream, eager steps, graphs and their capture alike, so buffers are
shared and nothing needs another event. On the CPU, which has neither streams nor pinned memory,
each step is over when it is launched; the kernels run under Triton's interpreter, for tests.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator

import numpy as np
import torch

from ...kernels.gpu.blocks import copy_blocks
from ...kernels.gpu.decode_attention import DecodeConfig, choose_decode_config
from ...kernels.gpu.prefill_attention import plan_tiles
from ...mq import codec
from ...mq.config import EngineConfig, ModelSpec
from ...mq.errors import ConfigError
from ...mq.messages import StepOutput, StepPlan, WorkerReady
from ..logits_processor import load_processors
from ..models import find_model
from ..runner import Done, PendingStep, Progress
from ..weights import DummyWeights, SafetensorsWeights, WeightSource
from . import memory
from .batch import GpuBatch, Slot, Step
from .compile_ahead import CompileServer, prepare_folder
from .decoder import GpuDecoder, Work
from .graphs import DecodeGraphs, at_least, batch_sizes, context_bounds, distinct_bounds
from .pending import GpuPending
from .prompt_logprobs import PromptLogprobsReader
from .sampler import Sampler
from .schemes import choose_cache_dtype, choose_scheme
from .stopwatch import Stopwatch
from .warm_up import WarmUp

log = logging.getLogger(__name__)


def choose_dtype(name: str) -> torch.dtype:
    dtype: torch.dtype = torch.bfloat16 if name == "auto" else getattr(torch, name)
    return dtype


def find_device(rank: int, engine: int = 0, ranks: int = 1) -> torch.device:
    """The device of a rank of a replica that has so many. Raises ConfigError if there is none."""
    number = engine * ranks + rank
    try:
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    except RuntimeError as error:
        raise ConfigError(f"device = 'cuda': {error}") from error
    if number >= count:
        raise ConfigError(
            f"device = 'cuda': worker {number} needs a device of its own, and torch "
            f"{torch.__version__} sees {count}"
        )
    return torch.device("cuda", number)


class GpuModelRunner:
    """device: another than the rank's own, such as the CPU in tests."""

    def __init__(
        self,
        config: EngineConfig,
        spec: ModelSpec,
        rank: int = 0,
        device: torch.device | None = None,
        engine: int = 0,
    ) -> None:
        self._config, self._spec, self._rank = config, spec, rank
        self._device = device or find_device(rank, engine, config.tensor_parallel_size)
        self._on_gpu = self._device.type == "cuda"
        self._stream: torch.cuda.Stream | None = None
        self._graphs: DecodeGraphs | None = None
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
            stack.enter_context(self._on_stream())
            return self._load(progress, server, watch)

    def _load(
        self, progress: Progress, server: CompileServer | None, watch: Stopwatch
    ) -> WorkerReady:
        meter = memory.Meter(self._device)
        if self._measures:
            meter.check_share(self._config.gpu_memory_utilization)
        with memory.room_for("weights"):
            self._load_weights(progress)
        weights = meter.settle()
        watch.lap("load")
        with memory.room_for("activations"):
            self._make_buffers()
            self._decoder.set_cache(1)
            warm_up = WarmUp(
                self._batch, self._decoder, self._sampler, self._bounds_of, self._uses_graphs
            )
            if server is not None:
                self._compile(warm_up, server, progress)
                watch.lap("compile")
                warm_up.run(lambda n, of: progress("warming up", n, of))
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

    def _compile(self, warm_up: WarmUp, server: CompileServer, progress: Progress) -> None:
        """Ahead of the launches, which do it themselves where this fails: it rests on what is
        inside of Triton, and another version may have other insides. What is wrong with a launch is
        raised again there.
        """
        try:
            kernels, compiled, errors = server.compile_missing(
                warm_up.variants, lambda n, of: progress("compiling kernels", n, of)
            )
            self._kernels = {"kernels": kernels, "kernels_compiled": compiled}
        except (ImportError, AttributeError, TypeError, ValueError, KeyError) as error:
            errors = [f"all of them: {type(error).__name__}: {error}"]
        for error in errors:
            log.warning("a kernel is compiled where it is launched, not ahead: %s", error)

    def _bounds_of(self, size: int) -> list[int]:
        """The bounds that make a difference to steps of `size` sequences."""
        return sorted(set(distinct_bounds(size, self._bounds, self._attention_of).values()))

    def _attention_of(self, size: int, bound: int) -> tuple[DecodeConfig, ...]:
        """How decode attention is launched, for each window of the model's layers."""
        c = self._model
        row_bytes = c.head_size * self._decoder.cache.element_size()
        return tuple(
            choose_decode_config(size, c.kv_heads, bound, window, row_bytes)
            for window in sorted(set(c.windows))
        )

    @property
    def _measures(self) -> bool:
        c = self._config
        given = c.num_gpu_blocks_override is not None or c.kv_cache_memory_bytes is not None
        return self._on_gpu and not given

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
        self._model = find_model(spec.architecture).check(spec.hf_config)
        self._scheme = choose_scheme(config, self._model.quantization, self._dtype, self._device)
        self._decoder = GpuDecoder(
            self._model,
            self._dtype,
            config.block_size,
            source,
            self._device,
            lambda n, total: progress("loading weights", n, total),
            self._scheme,
            choose_cache_dtype(config, self._dtype, self._device),
        )

    def _make_buffers(self) -> None:
        config, spec = self._config, self._spec
        self._sizes = batch_sizes(max(config.max_num_seqs, 2))
        self._bounds = context_bounds(spec.max_model_len)
        self._batch = GpuBatch(
            max_num_seqs=config.max_num_seqs,
            max_tokens=max(config.max_num_batched_tokens, config.max_num_seqs),
            max_model_len=spec.max_model_len,
            block_size=config.block_size,
            num_groups=len(self._decoder.groups),
            num_slots=config.max_steps_in_flight + 1,
            pad=lambda sequences: at_least(self._sizes, sequences),
            device=self._device,
        )
        self._decoder.bind(self._batch, spec.max_model_len)
        self._sampler = Sampler(
            self._batch.capacity,
            spec.vocab_size,
            spec.eos_token_ids,
            self._batch.tokens_RL,
            self._device,
            load_processors(config, spec),
        )
        self._work = Work(1, 1, 1)
        self._prompt_logprobs = PromptLogprobsReader(
            self._batch, lambda index: self._decoder.logits(index, self._work), spec.vocab_size
        )

    def _measure_graphs(self, meter: memory.Meter) -> int:
        """Bytes that all graphs will take: the first costs more than each of the others."""
        if not self._uses_graphs or self._stream is None:
            return 0
        graphs = DecodeGraphs(self._sizes, self._bounds, self._attention_of)
        kinds, before, made = list(graphs.kinds()), meter.used(), []
        used = []
        for kind in (kinds[0], kinds[-1]):
            made.append(graphs.capture_one(self._run_decode, kind, self._stream))
            used.append(meter.used() - before)
        return used[0] + max(used[1] - used[0], used[0] // 8) * (len(kinds) - 1)

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
        return WorkerReady(self._rank, num_blocks, config.block_size, groups)

    def _capture(self, progress: Progress) -> None:
        assert self._stream is not None
        graphs = DecodeGraphs(self._sizes, self._bounds, self._attention_of)
        with memory.room_for("graphs"):
            graphs.capture(
                self._run_decode,
                self._stream,
                lambda n, total: progress("capturing graphs", n, total),
            )
        self._graphs = graphs

    def _describe(self, terms: memory.Terms, num_blocks: int, seconds: dict[str, float]) -> None:
        kv_cache = num_blocks * self._decoder.block_bytes
        self._details = {
            "device": torch.cuda.get_device_name(self._device) if self._on_gpu else "cpu",
            "dtype": str(self._dtype).removeprefix("torch."),
            "quantization": str(self._scheme or "none"),
            "kv_cache_dtype": str(self._decoder.cache_dtype).removeprefix("torch."),
            "weights_bytes": self._decoder.num_bytes,
            "activation_bytes": terms.activations,
            "graph_bytes": terms.graphs,
            "kv_cache_bytes": kv_cache,
            "num_blocks": num_blocks,
            "block_size": self._config.block_size,
            "graphs": len(self._graphs) if self._graphs else 0,
            "memory": terms.table(kv_cache),
            **self._kernels,
            **seconds,
        }
        log.info("memory of %s: %s", self._device, self._details["memory"])

    def details(self) -> dict[str, str | int | float]:
        return self._details

    # --- steps

    def execute(self, plan: StepPlan) -> StepOutput:
        return self.launch(plan).read()

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> PendingStep:
        start = time.perf_counter()
        batch = self._batch
        batch.apply(plan)
        for new in plan.new:
            self._sampler.enter(new)
            self._prompt_logprobs.enter(new)
        rows, lengths = codec.ints(plan.rows), codec.ints(plan.num_tokens)
        if not (len(rows) or plan.copy_to or batch.is_changed):
            return Done(StepOutput(plan.step, b"", b"", None, time.perf_counter() - start))
        asks = len(rows) > 0 and self._prompt_logprobs.asks(rows)
        step = batch.lay_out(rows, lengths, whole=asks) if len(rows) else None
        slot = batch.take_slot()
        with self._on_stream():
            pending = self._enqueue(plan, step, slot, asks)
        slot.release = pending.settle
        return pending

    def _enqueue(self, plan: StepPlan, step: Step | None, slot: Slot, asks: bool) -> GpuPending:
        batch = self._batch
        pending = GpuPending(plan.step, slot, step)
        pending.begin()
        batch.fill(slot, step)
        copies = [slot.put(codec.ints(ids)) for ids in (plan.copy_from, plan.copy_to)]
        num_copies = len(plan.copy_to) // 4
        tiles = self._plan_tiles(slot, step)
        batch.send(slot)
        self._sampler.upload()
        if num_copies:
            copy_blocks(self._decoder.cache, *(batch.view(place, num_copies) for place in copies))
        if step is None:
            batch.apply_changes()
        else:
            plain = self._sampler.is_plain(step.sampled)
            replayed = self._replay(step, plain)
            if not replayed:
                self._run(step, tiles)
            if not (replayed and plain):
                self._sample(step, plain, pending)
            if asks:
                pending.prompts = self._prompt_logprobs.launch(step)
            count = len(step.sampled)
            slot.outputs[:count].copy_(batch.sampled_N[:count], non_blocking=True)
        pending.end()
        return pending

    def _plan_tiles(self, slot: Slot, step: Step | None) -> tuple[int, int] | None:
        """Of the sequences that prefill attention serves: their place in the slot's tail, and how
        many.
        """
        if step is None or step.is_decode:
            return None
        first = int(np.count_nonzero(step.lengths == 1)) if step.decodes else 0
        tiles = plan_tiles(step.lengths[first:], self._decoder.head_group, step.context[first:])
        tiles[0] += first
        return slot.put(tiles), tiles.shape[1]

    def _replay(self, step: Step, plain: bool) -> bool:
        """Run the graph of a decode step, if there is one."""
        if self._graphs is None or not step.is_decode:
            return False
        bound = at_least(self._bounds, step.longest)
        graph = self._graphs.find(step.decodes, bound, plain)
        if graph is None:
            return False
        graph.replay()
        self._work = Work(step.tokens, step.decodes, bound)
        return True

    def _run(self, step: Step, tiles: tuple[int, int] | None) -> None:
        """The forward pass, and the logits of the sampled tokens."""
        batch, decoder = self._batch, self._decoder
        batch.apply_changes()
        sequences = step.decodes if step.is_decode else len(step.rows)
        batch.lay_out_tokens(sequences, step.tokens, step.longest_chunk)
        bound = at_least(self._bounds, step.longest) if step.decodes else 0
        view = batch.view(tiles[0], 2, tiles[1]) if tiles else None
        self._work = Work(step.tokens, step.decodes, bound, view)
        decoder.forward(self._work)
        if len(step.sampled):
            decoder.logits(batch.last_N[: self._samples(step)], self._work)

    def _samples(self, step: Step) -> int:
        """Padded: a decode step's are its sequences."""
        return step.decodes if step.is_decode else at_least(self._sizes, len(step.sampled))

    def _sample(self, step: Step, plain: bool, pending: GpuPending) -> None:
        batch, count = self._batch, len(step.sampled)
        if not count:
            return
        if plain:
            self._sample_plain(self._samples(step))
            return
        pending.logprobs = self._sampler.sample(
            self._decoder.logits_NV[:count],
            step.sampled,
            step.positions,
            batch.sample_rows_N[:count],
            batch.sample_positions_N[:count],
            batch.sampled_N[:count],
        )
        batch.append(count)

    def _sample_plain(self, samples: int, pdl: bool = False) -> None:
        batch = self._batch
        self._sampler.sample_plain(
            self._decoder.logits_NV[:samples],
            batch.sample_rows_N[:samples],
            batch.sample_positions_N[:samples],
            batch.sampled_N[:samples],
            pdl=pdl,
        )
        batch.append(samples, pdl)

    def _run_decode(self, size: int, bound: int, whole: bool) -> None:
        """What a graph is captured from."""
        work = Work(size, size, bound)
        self._batch.prepare_decode(size, pdl=True)
        self._decoder.forward(work, pdl=True)
        self._decoder.logits(self._batch.last_N[:size], work, pdl=True)
        if whole:
            self._sample_plain(size, pdl=True)

    @contextlib.contextmanager
    def _on_stream(self) -> Iterator[None]:
        if self._stream is None:
            yield
        else:
            with torch.cuda.stream(self._stream):
                yield
