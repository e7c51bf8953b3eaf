"""That scripts/tune times nothing whose results are wrong."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from kernels.gpu.devices import DEVICE

from ringcast.kernels.gpu.decode_plan import DecodeConfig
from ringcast.kernels.gpu.experts import ExpertConfig
from ringcast.kernels.gpu.few_linear_table import Config
from ringcast.kernels.gpu.prefill_attention import PrefillConfig

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
CHECKED = (np.array([0, 1, 17, 40]), np.array([0, 1, 3, 30]))
HOW = {"device": str(DEVICE), "dtype": torch.float16}


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS / "gpu_bench"))
    torch.manual_seed(0)


def decode():
    from attention_space import DecodeCase

    return DecodeCase(2, 32, 2), DecodeConfig(3, 16, 4, 2)


def decode_of_8_bits():
    from attention_space import DecodeCase

    return DecodeCase(2, 32, 1), DecodeConfig(3, 32, 4, 2)


def prefill():
    from attention_space import PrefillCase

    return PrefillCase(32, 2, False, True), PrefillConfig(32, 4, 2, programs=4, descriptors=True)


def windowed_prefill():
    from attention_space import PrefillCase

    return PrefillCase(32, 2, True, False), PrefillConfig(16, 4, 2, programs=2)


@pytest.mark.parametrize("kind", [decode, decode_of_8_bits, prefill, windowed_prefill])
def test_attention(kind, monkeypatch):
    from attention_inputs import Decode, Prefill
    from attention_space import Model
    from tune_attention import AttentionBench

    (case, config), window = kind(), 20 if kind is windowed_prefill else 0
    bench = AttentionBench(case, [Model(4, 2, 32, window)], [], [], CHECKED, **HOW)
    assert bench.is_right(case, config)
    inputs = bench._checked[0]
    inputs.q.mul_(2)
    assert not bench.is_right(case, config)
    bench._wants = []
    assert bench.is_right(case, config)
    for launcher in (Decode, Prefill):  # a kernel that writes nothing
        monkeypatch.setattr(launcher, "launcher", lambda *_: lambda layer: None)
    assert not bench.is_right(case, config)


def experts_of(monkeypatch, **how):
    import expert_space
    import experts
    import tune_experts

    models = {"tiny": expert_space.Model(4, 2, 32, 16)}
    for module in (expert_space, tune_experts):
        monkeypatch.setattr(module, "MODELS", models)
    monkeypatch.setitem(expert_space.BANDS, 12, (1, 5))
    monkeypatch.setattr(experts, "SETS", 1)
    return tune_experts.ExpertBench(["tiny"], **how, **HOW)


@pytest.mark.parametrize("kind", [2, 1])
def test_experts(kind, monkeypatch):
    from expert_space import ExpertCase

    bench, case = experts_of(monkeypatch), ExpertCase(12, 16, kind)
    config = ExpertConfig(16, 32, 4, 2)
    assert case.points(["tiny"]) == [("tiny", 2), ("tiny", 10)]
    assert bench.is_right(case, config)
    layer = bench._of(case)[1]
    (layer.gate_up if kind == 2 else layer.down).mul_(2)
    assert not bench.is_right(case, config)
    bench._wants = []
    assert bench.is_right(case, config)
    layer.product, product = lambda *_: None, layer.product
    assert not bench.is_right(case, config)
    # Nor may padding be written.
    layer.product = lambda kind, config, step, out: (product(kind, config, step, out), out.fill_(0))
    assert not bench.is_right(case, config)


def test_what_experts_would_launch_is_looked_at_without_their_tokens(monkeypatch):
    from expert_space import DOWN, ExpertCase

    bench, case = experts_of(monkeypatch, look=True), ExpertCase(12, 16, DOWN)
    launch = bench.launch(case, ExpertConfig(16, 32, 4, 2))
    routed = [layer.sets[0][3].used_1 for layer in bench._of(case)]
    assert not any(routed)
    launch()
    assert routed[0] == 4  # two tokens have a block for each of their pairs


@pytest.mark.parametrize("parts", [("norm",), ("add",), ("norm", "silu")])
def test_products_of_one_token(parts):
    from few_space import Shape
    from tune_few import FewBench

    shape = Shape(32, 48, parts)
    bench = FewBench(shape, copies=1, **HOW)
    assert bench.is_right(shape, Config(2, 2, 32))
    bench._weights[0].mul_(2)
    assert not bench.is_right(shape, Config(2, 2, 32))
