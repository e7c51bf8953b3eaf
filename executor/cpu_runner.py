"""The model runner on processors: batch, model, cache and sampler of one worker, and the steps that
they make together. A worker of a stage before the last one answers no tokens.
"""

from __future__ import annotations

import os
import time

import numpy as np
import torch

from ..kernels.cpu import vectors
from ..kernels.cpu.compiled import cache_folder
from ..kernels.cpu.openmp import Tape
from ..mq import codec
from ..mq.config import EngineConfig, ModelSpec
from ..mq.heap import give_back_freed
from ..mq.messages import ExpertLoads, NewSequence, StepOutput, StepPlan, TokenLogprobs, WorkerReady
from ..mq.sampling_params import SamplingParams
from . import kv_memory
from .cpu_decoder import CpuDecoder
from .expert_balancer import ExpertBalancer
from .expert_reports import ExpertReports
from .host_experts import HostExperts
from .input_batch import InputBatch, Step
from .layers import widens
from .lockstep import Replicas
from .logits_processor import load_processors
from .models import find_model
from .parallel import HostGroup
from .pipeline import Place, Stage, join
from .prompt_logprobs import PromptLogprobsReader
from .quantization import refuse_quantized
from .quantized import make_layout
from .runner import Done, OtherHosts, Progress
from .sampled_tokens import Tokens
from .sampler import Sampler
from .weights import DummyWeights, SafetensorsWeights, WeightSource


def choose_dtype(name: str) -> torch.dtype:
    """ "auto" is bfloat16 where the processor multiplies it, natively or widened, else float32."""
    if name != "auto":
        dtype: torch.dtype = getattr(torch, name)
        return dtype
    multiplied = vectors.bfloat16_available() or widens()
    return torch.bfloat16 if multiplied else torch.float32


def choose_cache_dtype(name: str) -> torch.dtype | None:
    """None is the weights', which "auto" means."""
    return None if name == "auto" else getattr(torch, name)


class CpuModelRunner:
    def __init__(
        self,
        config: EngineConfig,
        spec: ModelSpec,
        rank: int = 0,
        group_fd: int = -1,
        engine: int = 0,
        others: OtherHosts | None = None,
    ) -> None:
        self._others = others or OtherHosts(0, config.num_workers * config.data_parallel_size)
        self._config, self._spec, self._rank = config, spec, rank
        self._group_fd, self._engine = group_fd, engine
        self._replicas: Replicas | None = None
        self._balancer: ExpertBalancer | None = None
        self._reports: ExpertReports | None = None
        self._details: dict[str, str | int | float] = {}

    @torch.inference_mode()
    def load(self, progress: Progress) -> WorkerReady:
        """Raises ModelLoadError for what is wrong with the model, ConfigError if it doesn't fit."""
        config, spec = self._config, self._spec
        ranks, workers = config.num_workers, self._others.num_here
        threads = config.num_threads or max(1, len(os.sched_getaffinity(0)) // workers)
        torch.set_num_threads(threads)
        declared = find_model(spec.architecture).check(spec.hf_config)
        refuse_quantized(spec.hf_config, config.device)
        self._place = place = self._join(declared.hidden_size)
        start = time.perf_counter()
        dtype = choose_dtype(config.dtype)
        source: WeightSource = DummyWeights(config.seed or 0)
        if config.load_format != "dummy":
            source = SafetensorsWeights(spec.path)
        layout = make_layout(dtype, config.quantization, config.deterministic)
        self._model = CpuDecoder(
            declared,
            layout,
            config.block_size,
            source,
            lambda n, total: progress("loading weights", n, total),
            place.group,
            config.enable_expert_parallel,
            place.stage,
            self._replicas,
            config.eplb_config.num_redundant_experts,
            choose_cache_dtype(config.kv_cache_dtype),
        )
        loaded = time.perf_counter()
        self._compile(layout.dtype, progress)
        if self._replicas is not None:
            self._replicas.agree(layout.dtype.itemsize, layout.padded(declared.hidden_size))
        compiled = time.perf_counter()
        self._batch = InputBatch(
            config.max_num_seqs,
            max(config.max_num_batched_tokens, config.max_num_seqs),
            spec.max_model_len,
            config.block_size,
            len(self._model.groups),
        )
        block_bytes = self._model.geometry.block_bytes
        groups = tuple(group.spec for group in self._model.groups)
        dealt = self._deal_experts()
        available = kv_memory.available_bytes() // workers
        if dealt is not None:
            available = max(0, available - dealt.num_bytes)
        num_blocks = kv_memory.num_blocks(
            config, groups, spec.max_model_len, block_bytes, available
        )
        self._attention = self._model.bind(self._batch, spec.max_model_len, num_blocks)
        self._tokens = Tokens(self._batch, place.tokens, place.stage.is_last)
        self._samples = place.stage.is_last and not place.group.rank
        if self._samples:
            self._sampler = Sampler(
                config.max_num_seqs,
                spec.vocab_size,
                spec.eos_token_ids,
                self._batch.known_tokens,
                load_processors(config, spec),
            )
        self._prompt_logprobs = PromptLogprobsReader(self._batch, self._model.logits)
        self._warm_up()
        give_back_freed()
        self._watch_experts(dealt)
        self._details = {
            "device": "cpu",
            "dtype": str(dtype).removeprefix("torch."),
            "threads": threads,
            "ranks": ranks,
            "stages": config.pipeline_parallel_size,
            **self._model.describe(),
            "weights_bytes": self._model.num_bytes(),
            "kv_cache_dtype": str(self._model.geometry.cache_dtype).removeprefix("torch."),
            "kv_cache_bytes": num_blocks * block_bytes,
            "num_blocks": num_blocks,
            "block_size": config.block_size,
            "kernel_cache": str(cache_folder() or "none: nothing can be written"),
            "load_seconds": round(loaded - start, 3),
            "compile_seconds": round(compiled - loaded, 3),
            "warm_up_seconds": round(time.perf_counter() - compiled, 3),
        }
        return WorkerReady(self._rank, num_blocks, config.block_size, groups)

    def details(self) -> dict[str, str | int | float]:
        return self._details

    def leave(self) -> None:
        self._place.leave()
        if self._replicas is not None:
            self._replicas.leave()

    def launch(self, plan: StepPlan) -> Done:
        return Done(self.execute(plan))

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepOutput:
        start = time.perf_counter()
        self._tokens.before(plan.removed, plan.rows)
        self._batch.apply(plan)
        for new in plan.new:
            if self._samples:
                self._sampler.enter(new)
            self._prompt_logprobs.enter(new)
        if plan.copy_to:
            self._attention.copy_blocks(codec.ints(plan.copy_from), codec.ints(plan.copy_to))
        any_work, any_tokens = False, bool(plan.rows)
        if self._replicas is not None:
            num_tokens = int(codec.ints(plan.num_tokens).sum())
            any_work, tokens = self._replicas.meet(plan.wave, num_tokens)
            any_tokens = bool(tokens.any())
        if self._balancer is not None and any_tokens:
            self._model.experts.turn[0] = self._balancer.before_step()
        if not plan.rows:
            if self._replicas is not None:
                self._model.idle()
            seconds = time.perf_counter() - start
            experts = self._report(any_tokens)
            return StepOutput(
                plan.step, b"", b"", None, seconds, any_work=any_work, experts=experts
            )
        step = self._batch.prepare(codec.ints(plan.rows), codec.ints(plan.num_tokens))
        logits = self._model.forward(step)
        start += self._place.stage.waited
        tokens, logprobs = step.sampled[:0], None
        if self._place.stage.is_last and len(step.sampled):
            tokens, logprobs = self._sample(logits, step)
        self._tokens.after(step.sampled, tokens)
        return StepOutput(
            plan.step,
            codec.pack(step.sampled[: len(tokens)]),
            codec.pack(tokens),
            logprobs,
            time.perf_counter() - start,
            self._prompt_logprobs.read(step),
            any_work=any_work,
            experts=self._report(any_tokens),
        )

    def notices(self) -> list[str]:
        return self._reports.notices() if self._reports is not None else []

    def _deal_experts(self) -> HostExperts | None:
        """None where none change ranks."""
        if not self._config.enable_eplb:
            return None
        group = self._place.group if self._replicas is None else self._replicas.all
        assert isinstance(group, HostGroup)
        return HostExperts(group, [*self._model.mixtures().values()])

    def _watch_experts(self, dealt: HostExperts | None) -> None:
        """From here on, as warming up was no load. Of replicas that step together all ranks count
        all tokens, so the first of them speaks for all.
        """
        config, mixtures = self._config.eplb_config, self._model.mixtures()
        for mixture in mixtures.values():
            mixture.loads_E[:] = 0
        if dealt is not None:
            self._balancer = ExpertBalancer(config, dealt)
        if mixtures and self._samples and (self._replicas is None or not self._engine):
            routes = {layer: mixture.routes for layer, mixture in mixtures.items()}
            self._reports = ExpertReports(routes, self._balancer, config)

    def _report(self, any_tokens: bool) -> ExpertLoads | None:
        if self._reports is None:
            return None
        asked = self._reports.ask(time.perf_counter(), any_tokens)
        if asked is None:
            return None
        loads = [mixture.loads_E for mixture in self._model.mixtures().values()]
        return self._reports.tell(asked, np.stack(loads))

    def _sample(
        self, logits: torch.Tensor | None, step: Step
    ) -> tuple[np.ndarray, TokenLogprobs | None]:
        """The output rank samples, and every rank of its stage learns what it has sampled."""
        if logits is None:
            tokens, logprobs = np.zeros(len(step.sampled), np.int32), None
        else:
            tokens, logprobs = self._sampler.sample(logits, step.sampled, step.sample_positions)
        self._place.group.broadcast(tokens)
        return tokens, logprobs

    def _join(self, hidden_size: int) -> Place:
        config = self._config
        num_links = self._others.num_links
        if not config.lockstep:
            return join(config, self._rank, self._group_fd, hidden_size, num_links)
        self._replicas = Replicas(config, self._rank, self._engine, self._group_fd, num_links)
        return Place(self._replicas.all, self._replicas.own, Stage(), None)

    def _compile(self, dtype: torch.dtype, progress: Progress) -> None:
        """The first rank compiles, and the others take what it has left in the cache."""
        world = self._place.world
        if self._rank:
            world.barrier()
        self._compile_kernels(dtype, progress)
        if not self._rank:
            world.barrier()
        world.barrier()  # all have their weights: what is free now, is free

    def _compile_kernels(self, dtype: torch.dtype, progress: Progress) -> None:
        kernels = self._model.kernels()
        for done, kernel in enumerate(kernels):
            progress("compiling kernels", done, len(kernels))
            kernel.compile(dtype, self._model.geometry.cache_dtype)
        Tape.compile()
        progress("compiling kernels", len(kernels), len(kernels))

    def _warm_up(self) -> None:
        """A step of one token in the null block: weights and buffers become real before somebody
        waits for them.
        """
        row, zero = codec.pack([0]), codec.pack([0])
        blocks, greedy = zero * self._batch.num_groups, SamplingParams(temperature=0.0)
        new = NewSequence(0, "warm-up", 0, zero, 1, 0, blocks, greedy)
        self.execute(StepPlan(-1, b"", [new], b"", b"", b"", b"", row, codec.pack([1])))
        self.execute(StepPlan(-1, row, [], b"", b"", b"", b"", b"", b""))
