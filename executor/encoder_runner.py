"""The model runner of encoders, whose steps give a vector for each sequence and no token.

There is no KV cache: a step computes whole sequences, and what is known of them is their tokens.
torch's own operators run it, on a processor or a CUDA device.
"""

from __future__ import annotations

import os
import time

import numpy as np
import torch
from numpy.typing import NDArray

from ..mq import codec
from ..mq.config import EngineConfig, ModelSpec
from ..mq.messages import StepOutput, StepPlan, WorkerReady
from .encoder import BertEncoder
from .models import find_model
from .pooling import pool
from .runner import Done, Progress
from .weights import DummyWeights, SafetensorsWeights, WeightSource


class EncoderRunner:
    """Its dtype is float32 unless another is asked for: vectors are compared by small differences,
    and encoders are small.
    """

    def __init__(
        self, config: EngineConfig, spec: ModelSpec, rank: int = 0, engine: int = 0
    ) -> None:
        assert spec.pooling is not None
        self._config, self._spec, self._rank, self._pooling = config, spec, rank, spec.pooling
        self._device = torch.device(config.device, engine if config.device == "cuda" else None)
        self._details: dict[str, str | int | float] = {}
        self._tokens: dict[int, NDArray[np.int32]] = {}  # by row

    @torch.inference_mode()
    def load(self, progress: Progress) -> WorkerReady:
        """Raises ModelLoadError for what is wrong with the model."""
        config, spec = self._config, self._spec
        start = time.perf_counter()
        threads = config.num_threads or max(
            1, len(os.sched_getaffinity(0)) // config.data_parallel_size
        )
        torch.set_num_threads(threads)
        dtype = torch.float32 if config.dtype == "auto" else getattr(torch, config.dtype)
        source: WeightSource = DummyWeights(config.seed or 0)
        if config.load_format != "dummy":
            source = SafetensorsWeights(spec.path)
        self._model = BertEncoder(
            find_model(spec.architecture).check(spec.hf_config),
            source,
            dtype,
            self._device,
            lambda n, total: progress("loading weights", n, total),
        )
        loaded = time.perf_counter()
        self._embed(np.zeros(1, dtype=np.int32), np.ones(1, dtype=np.int64))  # warm up
        self._details = {
            "device": config.device,
            "dtype": str(dtype).removeprefix("torch."),
            "threads": threads,
            "pooling": self._pooling.kind,
            "normalized": "yes" if self._pooling.normalize else "no",
            "dimension": self._pooling.dimension,
            "weights_bytes": self._model.num_bytes,
            "load_seconds": round(loaded - start, 3),
            "warm_up_seconds": round(time.perf_counter() - loaded, 3),
        }
        # Block 0 always exists; there are no others.
        return WorkerReady(self._rank, 1, config.block_size)

    def details(self) -> dict[str, str | int | float]:
        return self._details

    def launch(self, plan: StepPlan) -> Done:
        return Done(self.execute(plan))

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepOutput:
        start = time.perf_counter()
        for row in codec.ints(plan.removed).tolist():
            del self._tokens[row]
        for new in plan.new:
            self._tokens[new.row] = codec.ints(new.token_ids)
        vectors = b""
        if plan.rows:
            sequences = [self._tokens[row] for row in codec.ints(plan.rows).tolist()]
            lengths = codec.ints(plan.num_tokens).astype(np.int64)
            assert [len(ids) for ids in sequences] == lengths.tolist(), "a sequence isn't whole"
            vectors = self._embed(np.concatenate(sequences), lengths)
        seconds = time.perf_counter() - start
        return StepOutput(plan.step, plan.rows, b"", seconds=seconds, pooled=vectors)

    def _embed(self, token_ids: NDArray[np.int32], lengths: NDArray[np.int64]) -> bytes:
        hidden = self._model.forward(token_ids, lengths)
        vectors: bytes = pool(hidden, lengths, self._pooling).cpu().numpy().tobytes()
        return vectors
