"""Shares of a device's memory, by numbers that a test gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ringcast.executor.gpu import memory
from ringcast.mq.config import EngineConfig, build
from ringcast.mq.errors import ConfigError
from ringcast.mq.messages import FullAttentionSpec, SlidingWindowSpec

GIB = memory.GIB
TERMS = memory.Terms(100 * GIB, 2 * GIB, 16 * GIB, 3 * GIB, 1 * GIB)
FULL = (FullAttentionSpec(),)


def blocks(max_model_len: int = 1024, terms: memory.Terms = TERMS, **options: Any) -> int:
    options = {"device": "cuda", "block_size": 64, "max_num_seqs": 1000} | options
    config = build(EngineConfig, options)
    return memory.num_blocks(config, FULL, max_model_len, 8 << 20, terms)


def test_the_cache_gets_what_the_share_leaves():
    assert blocks() == (90 - 20) * GIB // (8 << 20)
    assert blocks(gpu_memory_utilization=0.5) == (50 - 20) * GIB // (8 << 20)


def test_what_others_have_is_not_there():
    busy = TERMS._replace(others=40 * GIB)
    assert blocks(terms=busy) == ((100 - 40 - 20) * GIB - memory.RESERVE) // (8 << 20)


def test_options_come_before_measurements():
    assert blocks(num_gpu_blocks_override=77) == 77
    assert blocks(kv_cache_memory_bytes=1 << 30) == 128
    assert blocks(kv_cache_memory_bytes=1 << 40) == 1000 * 16 + 1  # all that sequences can have


def test_groups_with_windows_need_less():
    config = build(EngineConfig, {"device": "cuda", "max_num_seqs": 1, "block_size": 64})
    groups = (*FULL, SlidingWindowSpec(64))
    fewer = memory.num_blocks(config, groups, 65536, 8 << 20, TERMS)
    assert 1 + 1024 < fewer < 1 + 2 * 1024


def test_a_sequence_that_does_not_fit_is_refused_with_the_terms():
    with pytest.raises(ConfigError) as caught:
        blocks(max_model_len=100_000, gpu_memory_utilization=0.21)
    assert str(caught.value) == (
        "max_model_len is 100000, and the KV cache has room for 8128 tokens (128 blocks, 1.00 GiB; "
        "one such sequence needs 12.22 GiB): set max_model_len to at most 8128, or raise "
        "gpu_memory_utilization. Of 100.00 GiB: in use by others 2.00 GiB, weights 16.00 GiB, "
        "activations 3.00 GiB, graphs 1.00 GiB, KV cache 1.00 GiB, free 77.00 GiB"
    )
    with pytest.raises(ConfigError, match=r"has room for 0 tokens \(0 blocks"):
        blocks(gpu_memory_utilization=0.1)


def test_an_allocation_that_fails_says_what_to_change():
    with (
        pytest.raises(ConfigError, match="no memory left for activations: lower max_num_batched"),
        memory.room_for("activations"),
    ):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3.00 GiB.\nmore")


def test_a_share_that_others_hold_is_refused(monkeypatch):
    meter = memory.Meter(torch.device("cpu"))
    monkeypatch.setattr(meter, "total", 100 * GIB)
    monkeypatch.setattr(meter, "others", 40 * GIB)
    monkeypatch.setattr(meter, "_free_at_start", 60 * GIB)
    meter.check_share(0.6)
    with pytest.raises(ConfigError, match=r"0.9: that is 90.00 GiB .* set it to at most 0.6,"):
        meter.check_share(0.9)
