"""The registry of runners, and what the worker relies on before it has one."""

from __future__ import annotations

import os
import subprocess
import sys

import msgspec
import pytest

from ringcast.executor import runner
from ringcast.mq.config import EngineConfig, ModelSpec, build
from ringcast.mq.errors import ConfigError

SPEC = ModelSpec(
    name="m",
    path="/nowhere",
    tokenizer_path="/nowhere",
    architecture="LlamaForCausalLM",
    vocab_size=8,
    max_model_len=8,
    eos_token_ids=[],
    hf_config={},
)


@pytest.mark.parametrize(
    ("device", "name"), [("fake", "FakeModelRunner"), ("cpu", "CpuModelRunner")]
)
def test_runners_by_device(device, name):
    made = runner.make_runner(build(EngineConfig, {"device": device}), SPEC)
    assert type(made).__name__ == name


def test_an_unknown_device_is_refused(monkeypatch):
    monkeypatch.delitem(runner.RUNNERS, "cpu")
    with pytest.raises(ConfigError, match=r"device = 'cpu': must be one of fake"):
        runner.make_runner(EngineConfig(), SPEC)


def test_a_device_that_depends_on_the_batch_is_refused_where_none_may(monkeypatch):
    config = build(EngineConfig, {"deterministic": True, "device": "fake"})
    assert runner.make_runner(config, SPEC)
    monkeypatch.setattr(runner, "DETERMINISTIC", ("cpu",))
    with pytest.raises(ConfigError, match=r"deterministic = True: device 'fake' .* cpu can keep"):
        runner.make_runner(config, SPEC)


def test_a_device_without_stages_is_refused(monkeypatch):
    config = build(EngineConfig, {"pipeline_parallel_size": 2, "device": "fake"})
    assert runner.make_runner(config, SPEC)
    monkeypatch.setattr(runner, "PIPELINED", ("cpu",))
    with pytest.raises(ConfigError, match=r"size = 2: device 'fake' has one stage only; cpu can"):
        runner.make_runner(config, SPEC)


def test_the_registry_imports_no_torch_and_waiting_threads_sleep_soon():
    fields = msgspec.structs.asdict(SPEC)
    program = (
        "import os, sys; from ringcast.executor import runner; assert 'torch' not in sys.modules\n"
        "from ringcast.mq.config import EngineConfig, ModelSpec\n"
        f"runner.make_runner(EngineConfig(), ModelSpec(**{fields!r}))\n"
        "assert 'torch' in sys.modules and 'transformers' not in sys.modules\n"
        "print(os.environ['GOMP_SPINCOUNT'])"
    )
    environment = {k: v for k, v in os.environ.items() if k != "GOMP_SPINCOUNT"}
    done = subprocess.run(
        [sys.executable, "-P", "-c", program], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 10_000
