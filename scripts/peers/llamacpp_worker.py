"""A benchmark worker: llama.cpp through llama-cpp-python's C functions, all sequences in one batch.

Speaks the protocol of scripts/bench (see transformers_worker.py). Argument: a .gguf file. The model
is loaded once; its cache is made anew for work that doesn't fit, before time is taken.
"""

import json
import os
import random
import sys
import time
from typing import Any

import llama_cpp as lib

TOKENS = 4096  # of one call
CONTEXT = 256  # of one sequence, which its cache is made in multiples of


class Engine:
    def __init__(self, path: str) -> None:
        lib.llama_backend_init()
        model_params = lib.llama_model_default_params()
        model_params.use_extra_bufts = False  # its AMX buffers die with SIGILL in 0.3.36
        self._model = lib.llama_model_load_from_file(path.encode(), model_params)
        assert self._model, f"{path} can't be loaded"
        self._context: Any = None
        self._sequences = self._length = 0
        self._sampler = lib.llama_sampler_init_greedy()
        self._batch = lib.llama_batch_init(TOKENS, 0, 1)

    def make_room(self, sequences: int, length: int) -> None:
        """For so many at once, of so many tokens each."""
        if sequences <= self._sequences and length <= self._length:
            return
        if self._context:
            lib.llama_free(self._context)
        self._sequences = max(sequences, self._sequences)
        self._length = max(-(-length // CONTEXT) * CONTEXT, self._length)
        params = lib.llama_context_default_params()
        params.n_ctx, params.n_seq_max = self._sequences * self._length, self._sequences
        params.n_batch, params.n_ubatch = TOKENS, 512
        params.n_threads = params.n_threads_batch = os.cpu_count() or 1
        self._context = lib.llama_init_from_model(self._model, params)
        assert self._context, f"{self._sequences} x {self._length} tokens have no room"

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


engine = Engine(sys.argv[1])
print("@@ ready", flush=True)
for line in sys.stdin:
    batch, num_in, num_out, seed = json.loads(line)
    rng = random.Random(seed)
    prompts = [rng.choices(range(1000, 40000), k=num_in) for _ in range(batch)]
    engine.make_room(batch, num_in + num_out)
    start = time.perf_counter()
    assert len(engine.generate(prompts, num_out)) == batch
    print("@@", time.perf_counter() - start, flush=True)
