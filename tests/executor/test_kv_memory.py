"""What is measured, and the arithmetic that follows."""

from __future__ import annotations

import pytest

from ringcast.executor.kv_memory import available_bytes, num_blocks
from ringcast.mq.config import EngineConfig, build
from ringcast.mq.errors import ConfigError
from ringcast.mq.messages import FullAttentionSpec, SlidingWindowSpec

BLOCK_BYTES = 1000
FULL = [FullAttentionSpec()]


def config(**options: object) -> EngineConfig:
    return build(EngineConfig, {"block_size": 16, "max_num_seqs": 4} | options)


def test_a_share_of_what_is_available():
    assert num_blocks(config(memory_utilization=0.5), FULL, 128, BLOCK_BYTES, 40_000) == 20


def test_no_more_than_can_ever_be_used():
    # 4 sequences of 128 tokens are 32 blocks, and block 0 is reserved.
    assert num_blocks(config(memory_utilization=1.0), FULL, 128, BLOCK_BYTES, 10**9) == 33
    assert num_blocks(config(memory_utilization=1.0), FULL, 129, BLOCK_BYTES, 10**9) == 37


def test_windows_need_no_more_than_they_reach():
    groups = [*FULL, SlidingWindowSpec(32), SlidingWindowSpec(32)]
    options = {"memory_utilization": 1.0, "max_num_batched_tokens": 17}
    # 8 blocks of full attention; (32 - 1 + 17) / 16 + 1 for each window.
    assert num_blocks(config(**options), groups, 128, BLOCK_BYTES, 10**9) == 1 + 4 * (8 + 4 + 4)
    assert num_blocks(config(**options), groups, 128, BLOCK_BYTES, 17_000) == 17
    with pytest.raises(ConfigError, match="room for 112 tokens"):
        num_blocks(config(**options), groups, 128, BLOCK_BYTES, 16_000)


def test_bytes_and_blocks_can_be_given():
    assert num_blocks(config(kv_cache_memory_bytes=12_999), FULL, 128, BLOCK_BYTES, 0) == 12
    assert num_blocks(config(num_gpu_blocks_override=50), FULL, 128, BLOCK_BYTES, 0) == 50


def test_too_little_for_one_block():
    with pytest.raises(ConfigError) as error:
        num_blocks(config(memory_utilization=0.25), FULL, 128, BLOCK_BYTES, 4000)
    for part in ("2000 bytes", "1000 (memory_utilization, of 4000", "raise memory_utilization"):
        assert part in str(error.value)
    with pytest.raises(ConfigError, match="raise kv_cache_memory_bytes"):
        num_blocks(config(kv_cache_memory_bytes=1999), FULL, 128, BLOCK_BYTES, 4000)


@pytest.mark.parametrize(
    ("options", "option"),
    [
        ({"memory_utilization": 0.5}, "memory_utilization"),
        ({"kv_cache_memory_bytes": 8000}, "kv_cache_memory_bytes"),
        ({"num_gpu_blocks_override": 8}, "num_gpu_blocks_override"),
    ],
)
def test_the_context_must_fit(options, option):
    with pytest.raises(ConfigError) as error:
        num_blocks(config(**options), FULL, 128, BLOCK_BYTES, 16_000)
    for part in ("max_model_len is 128", "room for 112 tokens", f"raise {option}", "9000 bytes"):
        assert part in str(error.value)
    assert num_blocks(config(**options), FULL, 112, BLOCK_BYTES, 16_000) == 8


def system(root, meminfo: int, cgroup: str, files: dict[str, str]):
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(f"MemTotal: 999 kB\nMemAvailable:  {meminfo} kB\n")
    (root / "proc/self/cgroup").write_text(cgroup)
    for name, text in files.items():
        path = root / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_free_memory_of_the_machine(tmp_path):
    assert available_bytes(system(tmp_path, 7, "0::/\n", {})) == 7 * 1024
    assert available_bytes() > 0


def test_limits_of_control_groups_v2(tmp_path):
    files = {
        "a/memory.max": "max",
        "a/memory.current": "0",
        "a/b/memory.max": "5000\n",
        "a/b/memory.current": "3000\n",
        "a/b/memory.stat": "anon 1\ninactive_file 500\n",
    }
    assert available_bytes(system(tmp_path, 100, "0::/a/b\n", files)) == 2500


def test_a_parent_group_may_be_the_tighter_one(tmp_path):
    files = {
        "a/memory.max": "1000",
        "a/memory.current": "400",
        "a/b/memory.max": "5000",
        "a/b/memory.current": "300",
    }
    assert available_bytes(system(tmp_path, 100, "0::/a/b\n", files)) == 600


def test_limits_of_control_groups_v1_mounted_as_a_containers_root(tmp_path):
    files = {
        "memory/memory.limit_in_bytes": "9000",
        "memory/memory.usage_in_bytes": "8000",
        "memory/memory.stat": "inactive_file 1\ntotal_inactive_file 2000\n",
    }
    groups = "5:cpu:/x\n4:memory:/docker/1234\n0::/\n"
    assert available_bytes(system(tmp_path, 100, groups, files)) == 3000


def test_an_overrun_limit_is_no_memory(tmp_path):
    files = {"memory.max": "1000", "memory.current": "1400"}
    assert available_bytes(system(tmp_path, 100, "0::/\n", files)) == 0
