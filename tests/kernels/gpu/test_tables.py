"""The tables that scripts/tune writes, and what the kernels take where they have nothing."""

from __future__ import annotations

import pytest
import torch

from ringcast.kernels.gpu import (
    decode_plan,
    decode_table,
    expert_table,
    experts,
    prefill_attention,
    prefill_table,
)
from ringcast.kernels.gpu.architecture import architecture_of
from ringcast.kernels.gpu.decode_plan import DecodeConfig, choose_decode_config
from ringcast.kernels.gpu.experts import LARGEST_PLAN, PLANS, ExpertConfig, choose_plan
from ringcast.kernels.gpu.prefill_attention import (
    TILE_ROWS,
    PrefillConfig,
    choose_prefill_config,
)

HOPPER, OTHER = (9, 0), (8, 0)


def test_decode_attention_takes_its_entry_or_else_the_rule(monkeypatch):
    rule = choose_decode_config(8, 128, 2, None)
    monkeypatch.setattr(decode_plan, "TUNED", {HOPPER: {(8, 128, 2): (7, 64, 8, 5)}})
    assert choose_decode_config(8, 128, 2, HOPPER) == DecodeConfig(7, 64, 8, 5)
    assert choose_decode_config(8, 128, 2, OTHER) == rule
    assert choose_decode_config(8, 128, 1, HOPPER) == rule
    assert choose_decode_config(4, 128, 2, HOPPER) == DecodeConfig(132, 32, 2, 3)


def test_prefill_attention_takes_its_entry_or_else_the_rule(monkeypatch):
    rule = choose_prefill_config(128, 2, False, False, None)
    entries = {(128, 2, True, False): (32, 4, 2, 256, 4, False)}
    monkeypatch.setattr(prefill_attention, "TUNED", {HOPPER: entries})
    tuned = PrefillConfig(32, 4, 2, programs=4)
    assert choose_prefill_config(128, 2, True, False, HOPPER) == tuned
    assert choose_prefill_config(128, 2, False, False, HOPPER) == rule
    assert choose_prefill_config(128, 2, True, False, OTHER) == rule
    assert choose_prefill_config(128, 2, True, True, HOPPER).descriptors


def test_experts_take_the_next_plan_or_else_the_rule(monkeypatch):
    up, down = (64, 128, 4, 5), (128, 64, 8, 4)
    tuned = {0.5: (16, up, down), 32: (32, up, up), 100: (64, down, down)}
    monkeypatch.setattr(experts, "TUNED", {HOPPER: tuned})
    for pairs, most in ((1, 0.5), (32, 0.5), (33, 32), (2048, 32), (2049, 100), (99999, 100)):
        plan = choose_plan(pairs, 64, 2, HOPPER)
        assert (plan.rows, *map(tuple, plan[1:])) == tuned[most]
    assert choose_plan(32, 64, 4, HOPPER).down == ExpertConfig(128, 32, 8, 4)
    assert choose_plan(32, 64, 2, OTHER) == choose_plan(32, 64, 2, None) == PLANS[0][1]
    assert choose_plan(99999, 64, 2, None) == LARGEST_PLAN


def test_only_a_cuda_device_has_a_table():
    assert architecture_of(torch.device("cpu")) is None


@pytest.mark.parametrize("architecture", prefill_table.TUNED)
def test_tiles_of_prefill_attention_are_as_the_engine_plans_them(architecture):
    for fields in prefill_table.TUNED[architecture].values():
        config = PrefillConfig(*fields)
        assert config.rows == TILE_ROWS
        assert config.rows % config.programs == 0
        assert isinstance(config.descriptors, bool)


@pytest.mark.parametrize("architecture", decode_table.TUNED)
def test_tiles_of_decode_attention_are_powers_of_two(architecture):
    for fields in decode_table.TUNED[architecture].values():
        config = DecodeConfig(*fields)
        assert config.workers >= 1
        assert config.tile >= 16
        assert config.tile & (config.tile - 1) == 0


@pytest.mark.parametrize("architecture", expert_table.TUNED)
def test_plans_of_experts_fit_shared_memory(architecture):
    for rows, *products in expert_table.TUNED[architecture].values():
        for config, weights in zip(map(ExpertConfig._make, products), (2, 1), strict=True):
            shared = (rows + weights * config.outputs) * config.block * 2
            assert shared * (config.stages - (rows < 64)) <= 227 * 1024
