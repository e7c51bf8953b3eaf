"""Which device `auto` is, and what an engine's options have to do with the device."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from ringcast.mq import devices
from ringcast.mq.config import EngineConfig, build
from ringcast.mq.devices import (
    DEVICE_DEFAULTS,
    ONLY_ON,
    explain_default,
    find_device,
    num_cuda_devices,
)
from ringcast.mq.errors import ConfigError

VERSION = """from typing import Optional
__version__ = '{version}'
cuda: Optional[str] = {cuda}
hip: Optional[str] = None
"""
CUDA_BUILD = VERSION.format(version="2.11.0+cu128", cuda="'12.8'")
CPU_BUILD = VERSION.format(version="2.13.0+cpu", cuda=None)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """machine(nodes, visible, version): one with these in /dev, a value of CUDA_VISIBLE_DEVICES
    (or None), and a torch/version.py.
    """

    def make(nodes=("nvidiactl", "nvidia0"), visible=None, version=CUDA_BUILD):
        for node in nodes:
            (tmp_path / node).touch()
        monkeypatch.setattr(devices, "DEV", tmp_path)
        monkeypatch.setattr(devices, "_torch_version", lambda: version)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        return tmp_path

    return make


# --- auto -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("visible", [None, "0", "1,0", " 3 ", "GPU-4f2a", "MIG-77", "0,-1"])
def test_a_machine_with_a_device_a_driver_and_a_torch_for_it_has_cuda(machine, visible) -> None:
    machine(visible=visible)
    assert find_device() == "cuda"


@pytest.mark.parametrize("visible", ["", "-1", "-1,0", "NoDevFiles", "none"])
def test_no_device_may_be_seen(machine, visible) -> None:
    machine(visible=visible)
    assert find_device() == "cpu"


@pytest.mark.parametrize("nodes", [(), ("nvidiactl",), ("nvidia0",), ("nvidiactl", "nvidia-uvm")])
def test_a_driver_or_a_device_is_missing(machine, nodes) -> None:
    machine(nodes=nodes)
    assert find_device() == "cpu"


@pytest.mark.parametrize("node", ["nvidiactl", "nvidia0"])
def test_a_device_that_may_not_be_opened(machine, node, monkeypatch) -> None:
    machine()
    # Root may open everything, so the kernel's answer is made up.
    monkeypatch.setattr(devices.os, "access", lambda path, mode: Path(path).name != node)
    assert find_device() == "cpu"


@pytest.mark.parametrize("version", [CPU_BUILD, ""])
def test_torch_is_not_for_cuda(machine, version) -> None:
    machine(version=version)
    assert find_device() == "cpu"


@pytest.mark.parametrize(
    ("visible", "most"), [(None, 2), ("", 0), ("0", 1), ("3, 1,GPU-5e", 3), ("0,-1,1", 1)]
)
def test_devices_that_may_be_seen_are_counted(machine, visible, most) -> None:
    machine(nodes=("nvidiactl", "nvidia0", "nvidia1"), visible=visible)
    assert num_cuda_devices() == most


def test_looking_imports_no_torch() -> None:
    code = (
        "import sys\n"
        "from ringcast.mq import devices\n"
        "version = devices._torch_version()\n"
        "devices.find_device()\n"
        "assert 'torch' not in sys.modules\n"
        "from importlib import metadata\n"
        "assert f\"__version__ = '{metadata.version('torch')}\" in version, version\n"
    )
    subprocess.run([sys.executable, "-P", "-c", code], check=True, timeout=120)


def test_a_config_names_the_device_itself(machine) -> None:
    machine()
    assert build(EngineConfig, {}).device == EngineConfig().device == "cuda"
    machine(visible="")
    assert build(EngineConfig, {}).device == EngineConfig().device == "cpu"
    assert EngineConfig(device="fake").device == "fake"


# --- defaults -------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICE_DEFAULTS)
def test_each_device_has_its_own_defaults(device) -> None:
    config = build(EngineConfig, {"device": device, "max_num_seqs": 7})
    own = {**DEVICE_DEFAULTS[device], "max_num_seqs": 7}
    assert {name: getattr(config, name) for name in own} == own
    assert build(EngineConfig, msgspec.structs.asdict(config)) == config
    wire = msgspec.msgpack.encode(config)
    assert msgspec.msgpack.decode(wire, type=EngineConfig) == config


def test_every_device_has_a_default_for_each_of_these_options() -> None:
    assert len({frozenset(defaults) for defaults in DEVICE_DEFAULTS.values()}) == 1


def test_auto_takes_the_defaults_of_what_it_finds(machine) -> None:
    machine()
    assert EngineConfig() == EngineConfig(device="cuda")
    assert (EngineConfig().block_size, EngineConfig(device="cpu").block_size) == (64, 16)


def test_defaults_in_words() -> None:
    assert explain_default("block_size") == "16 on cpu and fake, 64 on cuda"
    assert explain_default("seed") == ""


# --- options of one device ------------------------------------------------------------------------

OTHER = {
    "num_threads": 3,
    "memory_utilization": 0.25,
    "gpu_memory_utilization": 0.25,
    "enforce_eager": True,
    "kv_cache_dtype": "float32",
    "enable_expert_parallel": True,
    "enable_eplb": True,
}
# Of these, what they need beside the device.
NEEDED = {"enable_eplb": {"enable_expert_parallel": True, "tensor_parallel_size": 2}}


@pytest.mark.parametrize("option", ONLY_ON)
@pytest.mark.parametrize("device", DEVICE_DEFAULTS)
def test_an_option_of_another_device_is_refused(option, device) -> None:
    options = {"device": device, option: OTHER[option]}
    if device in ONLY_ON[option]:
        options |= NEEDED.get(option, {})
        assert getattr(build(EngineConfig, options), option) == OTHER[option]
        return
    with pytest.raises(ConfigError) as caught:
        build(EngineConfig, options)
    have = {1: "{} alone has it", 2: "{} and {} have it"}[len(ONLY_ON[option])]
    assert str(caught.value) == (
        f"{option} = {OTHER[option]!r}: device {have.format(*map(repr, ONLY_ON[option]))}, and "
        f"this engine's is {device!r}"
    )


def test_the_refusal_says_that_auto_chose(machine) -> None:
    machine()
    with pytest.raises(ConfigError, match=r"is 'cuda' \(auto; --device takes another\)$"):
        build(EngineConfig, {"num_threads": 2})


@pytest.mark.parametrize("size", [1, 8, 17, 48, 255])
def test_blocks_of_a_size_that_cuda_has_no_kernels_for(size) -> None:
    assert build(EngineConfig, {"device": "cpu", "block_size": size}).block_size == size
    with pytest.raises(ConfigError, match=rf"^block_size = {size}: device 'cuda' takes 16, 32,"):
        build(EngineConfig, {"device": "cuda", "block_size": size})


@pytest.mark.parametrize("size", [16, 32, 64, 128, 256])
def test_blocks_of_a_size_that_cuda_has(size) -> None:
    assert build(EngineConfig, {"device": "cuda", "block_size": size}).block_size == size
