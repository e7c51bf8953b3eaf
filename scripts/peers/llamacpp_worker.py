"""A benchmark worker: llama.cpp through llama-cpp-python's C functions, all sequences in one batch.

Speaks the protocol of scripts/bench (see transformers_worker.py). Arguments: a .gguf file, and the
most sequences (64).
"""

import json
import os
import random
import sys
import time
from typing import Any

import llama_cpp as lib

TOKENS = 4096  # of one call
CONTEXT = 256  # of one sequence


class Engine:
    def __init__(self, path: str, sequences: int) -> None:
        lib.llama_backend_init()
        model_params = lib.llama_model_default_params()
        model_params.use_extra_bufts = False  # its AMX buffers die with SIGILL in 0.3.36
        model = lib.llama_model_load_from_file(path.encode(), model_params)
        params = lib.llama_context_default_params()
        params.n_ctx, params.n_seq_max = sequences * CONTEXT, sequences
        params.n_batch, params.n_ubatch = TOKENS, 512
        params.n_threads = params.n_threads_batch = os.cpu_count() or 1
        self._context = lib.llama_init_from_model(model, params)
        assert self._context, f"{path} can't be loaded"
        self._sampler = lib.llama_sampler_init_greedy()
        self._batch = lib.llama_batch_init(TOKENS, 0, 1)

    def generate(self, prompts: list[list[int]], num_out: int) -> list[int]:
        """The last token of each."""
        lib.llama_memory_clear(lib.llama_get_memory(self._context), True)
        tokens: list[int] = []
        length = len(prompts[0])
        for first in range(0, len(prompts), TOKENS // length):
            part = prompts[first : first + TOKENS // length]
            entries = [
                (token, place, first + i, place == length - 1)
                for i, prompt in enumerate(part)
                for place, token in enumerate(prompt)
            ]
            tokens += self._step(entries)
        for place in range(length, length + num_out - 1):
            tokens = self._step([(token, place, i, True) for i, token in enumerate(tokens)])
        return tokens

    def _step(self, entries: list[tuple[int, int, int, bool]]) -> list[int]:
        batch: Any = self._batch
        for i, (token, place, sequence, wanted) in enumerate(entries):
            batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, place, 1
            batch.seq_id[i][0], batch.logits[i] = sequence, wanted
        batch.n_tokens = len(entries)
        assert lib.llama_decode(self._context, batch) == 0
        return [
            lib.llama_sampler_sample(self._sampler, self._context, i)
            for i, entry in enumerate(entries)
            if entry[3]
        ]


engine = Engine(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 64)
print("@@ ready", flush=True)
for line in sys.stdin:
    batch, num_in, num_out, seed = json.loads(line)
    rng = random.Random(seed)
    prompts = [rng.choices(range(1000, 40000), k=num_in) for _ in range(batch)]
    start = time.perf_counter()
    assert len(engine.generate(prompts, num_out)) == batch
    print("@@", time.perf_counter() - start, flush=True)
