"""How long a decode step takes on the GPU that this runs on, without the other actors: the runner
alone, driven two plans ahead.

    decode_steps.py qwen3-0.6b 8x96 64x96 256x800      # sequences x context, random weights
    decode_steps.py llama-3.1-8b 64x96 --temperature 0

A sequence's context is as if it had been computed; it grows by a token a step.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np

from ringcast.executor.gpu.runner import GpuModelRunner
from ringcast.frontend.hub import resolve_model
from ringcast.mq import codec
from ringcast.mq.config import EngineConfig, build
from ringcast.mq.messages import NewSequence, StepPlan
from ringcast.mq.sampling_params import SamplingParams

MODELS = Path(__file__).resolve().parents[1] / "data" / "models"
STEPS, WARM_UP = 60, 10


class Driver:
    def __init__(self, model: str, temperature: float) -> None:
        self._config = build(
            EngineConfig,
            {
                "model": str(MODELS / model),
                "load_format": "dummy",
                "skip_tokenizer_init": True,
                "device": "cuda",
                "max_model_len": 4096,
                "seed": 0,
            },
        )
        self._temperature = temperature
        self._runner = GpuModelRunner(self._config, resolve_model(self._config))
        self._runner.load(lambda *_: None)
        self._number = 0

    def run(self, batch: int, context: int) -> tuple[float, float]:
        """Median milliseconds of a step: from one to the next, and on the device."""
        rows, ones = list(range(batch)), [1] * batch
        new = [self._sequence(row, context) for row in rows]
        pending = [self._launch(new=new, rows=rows, lengths=ones)]
        ends, device = [], []
        for _ in range(STEPS):
            pending.append(self._launch(rows=rows, lengths=ones))
            step = pending.pop(0)
            while not step.done():
                pass
            device.append(step.read().seconds)
            ends.append(time.perf_counter())
        for step in pending:
            step.read()
        self._launch(removed=rows).read()
        gaps = np.diff(ends[WARM_UP:]).tolist()
        return 1e3 * statistics.median(gaps), 1e3 * statistics.median(device[WARM_UP:])

    def _sequence(self, row: int, context: int) -> NewSequence:
        blocks = -(-(context + STEPS + 2) // self._config.block_size)
        ids = np.random.default_rng(row).integers(0, 10000, context).tolist()
        table = list(range(1 + row * blocks, 1 + (row + 1) * blocks))
        params = SamplingParams(temperature=self._temperature, seed=row)
        return NewSequence(
            row, str(row), 0, codec.pack(ids), context, context - 1, codec.pack(table), params
        )

    def _launch(
        self,
        removed: list[int] | None = None,
        new: list[NewSequence] | None = None,
        rows: list[int] | None = None,
        lengths: list[int] | None = None,
    ) -> Any:
        self._number += 1
        plan = StepPlan(
            self._number,
            codec.pack(removed or []),
            new or [],
            b"",
            b"",
            b"",
            b"",
            codec.pack(rows or []),
            codec.pack(lengths or []),
        )
        return self._runner.launch(plan)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", choices=sorted(path.name for path in MODELS.iterdir()))
    parser.add_argument("shapes", nargs="+", metavar="SEQUENCESxCONTEXT")
    parser.add_argument("--temperature", type=float, default=0.6)
    args = parser.parse_args()
    driver = Driver(args.model, args.temperature)
    for shape in args.shapes:
        batch, context = map(int, shape.split("x"))
        between, device = driver.run(batch, context)
        print(f"{args.model} {shape}: {between:.3f} ms a step, {device:.3f} ms on the device")


if __name__ == "__main__":
    main()
