"""What scripts/tune tries, and the tables that it writes."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path

import pytest

from ringcast.kernels.gpu import (
    batch_linear_table,
    decode_table,
    expert_table,
    few_linear_table,
    prefill_table,
    tile_linear,
)
from ringcast.kernels.gpu.batch_linear_table import MULTIPROCESSORS, TUNED, Config

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
TILE = Config(128, 128, 64, 4, 8, 3, 4, swap=False, tma=True)


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS / "gpu_bench"))


def hopper(**changes: int):
    from spaces import Limits

    return Limits((9, 0), 132, 227 * 1024, 65536)._replace(**changes)


def attention_cases():
    from attention_space import MODELS, decode_cases, prefill_cases

    return [*decode_cases(list(MODELS), [2, 1]), *prefill_cases(list(MODELS))]


@pytest.mark.parametrize("tokens", [2, 64, 200, 512])
def test_what_is_tried_can_be_launched(tokens):
    import torch
    from dense_space import MODELS, Case, allowed, first_round, second_round

    for shape in MODELS["qwen3-0.6b"]:
        case = Case(shape, tokens)
        found = first_round(case, 16)
        again = second_round(case, found[:3])
        assert 2 <= len(found) <= 18
        assert any(config.tma for config in found) == (tokens > 16)
        x, weight = torch.empty(tokens, shape.inputs), torch.empty(64, shape.inputs)
        for config in (*found, *again):
            assert allowed(case, config)
            if config.tma:
                tile_linear.check_tile_linear(x, weight, config, shape.gated)


def test_programs_that_wait_for_each_other_run_at_once():
    from dense_space import MODELS, Case, programs_of, tiles

    for shape in MODELS["llama-3.1-8b"]:
        for config in tiles(case := Case(shape, 256)):
            assert config.splits == 1 or programs_of(case, config) <= MULTIPROCESSORS


def test_what_cant_fit_a_device_isnt_tried():
    from expert_space import expert_cases

    for case in [*attention_cases(), *expert_cases(hopper())]:
        large, small = ([*case.candidates(hopper(shared=size * 1024))] for size in (227, 64))
        assert set(small) < set(large)
        for config in large:
            assert (config in small) == (case.shared_bytes(config, hopper()) <= 64 * 1024)


def test_all_workers_of_decode_attention_have_room_at_once():
    from attention_space import DecodeCase

    case = DecodeCase(8, 128, 2)
    for config in case.candidates(hopper()):
        resident = config.workers * case.kv_heads / 132
        assert resident * config.warps * 32 <= 65536 // 160
    assert {c.workers for c in case.candidates(hopper(multiprocessors=264))} >= {33, 66, 132}
    assert not {c.warps for c in case.candidates(hopper(registers=16384))} - {2}


def test_what_is_in_use_is_tried_first_and_then_what_is_near():
    from expert_space import expert_cases
    from spaces import distance, first_round, second_round

    for case in [*attention_cases(), *expert_cases(hopper())]:
        in_use, *others = first_round(case, hopper(), 12)
        assert in_use == case.in_use(hopper())
        assert in_use not in others
        assert 8 <= len(others) <= 12
        far = [distance(config, in_use) for config in others]
        assert far == sorted(far)
        assert set(others) <= set(case.candidates(hopper()))
        again = second_round(case, hopper(), others[:2])
        assert again
        assert set(again) <= set(case.candidates(hopper()))
        assert all(min(distance(c, each) for each in others[:2]) <= 2 for c in again)


def test_a_case_is_measured_with_the_models_that_it_is_for():
    from attention_space import DecodeCase, Model, PrefillCase
    from expert_space import DOWN, ExpertCase

    names = ["qwen3", "mistral", "gemma3"]
    assert DecodeCase(8, 128, 1).points(names) == [Model(16, 8, 128), Model(32, 8, 128)]
    assert PrefillCase(128, 2, True, False).points(names) == [Model(32, 8, 128, window=4096)]
    assert PrefillCase(256, 2, False, True).points(names) == [Model(4, 1, 256)]
    models = ["qwen3-30b-a3b", "mixtral-8x7b"]
    assert ExpertCase(12, 16, DOWN).points(models) == [
        ("qwen3-30b-a3b", 32),
        ("mixtral-8x7b", 8),
        ("qwen3-30b-a3b", 128),
        ("mixtral-8x7b", 32),
    ]


def test_every_plan_is_tried_with_its_own_rows_first():
    from expert_space import BANDS, DOWN, GATE_UP, ExpertCase, expert_cases, plan_in_use

    cases = expert_cases(hopper())
    assert [(case.most, case.kind) for case in cases[:4]] == [
        (0.5, GATE_UP), (0.5, DOWN), (12, GATE_UP), (12, DOWN)
    ]  # fmt: skip
    assert {case.rows for case in cases if case.most == 32} == {16, 32, 64}
    assert {case.rows for case in cases if case.most == 512} == {64, 128}
    for most in BANDS:
        plan = plan_in_use(most, hopper())
        assert ExpertCase(most, plan.rows, GATE_UP).in_use(hopper()) == plan.gate_up
        assert ExpertCase(most, plan.rows, DOWN).in_use(hopper()) == plan.down


@pytest.mark.parametrize(
    "module",
    [batch_linear_table, few_linear_table, decode_table, prefill_table, expert_table],
)
def test_a_table_is_written_in_place(module, tmp_path):
    from tables import replace_tuned

    path = Path(shutil.copy(module.__file__, tmp_path / "table.py"))
    replace_tuned(path, module.TUNED)
    assert path.read_text() == Path(module.__file__).read_text()
    tuned = {(9, 9): {(1, 2): (3, 4), 0.5: (16, (1, 2), (3, 4))}} | module.TUNED
    replace_tuned(path, tuned)
    assert tuned == loaded(path).TUNED
    ours, theirs = Path(module.__file__).read_text(), path.read_text()
    assert theirs.partition("\nTUNED: ")[0] == ours.partition("\nTUNED: ")[0]
    assert theirs.partition("\n}\n")[2] == ours.partition("\n}\n")[2]


def test_dense_shapes_that_are_all_cublas_have_no_entry(tmp_path):
    from tables import replace_tuned
    from tune_dense import in_order

    path = Path(shutil.copy(batch_linear_table.__file__, tmp_path / "table.py"))
    tuned = TUNED | {(8, 16, True): {64: TILE, 2: None}, (8, 24, False): {2: None}}
    replace_tuned(path, in_order(tuned))
    again = loaded(path).TUNED
    assert again == TUNED | {(8, 16, True): {2: None, 64: tuple(TILE)}}
    assert list(again[8, 16, True]) == [2, 64]


def test_a_file_without_a_table_is_left_alone(tmp_path):
    from tables import replace_tuned

    path = tmp_path / "table.py"
    path.write_text("TUNED = {}\n")
    with pytest.raises(ValueError, match="has no TUNED"):
        replace_tuned(path, {})
    assert path.read_text() == "TUNED = {}\n"


def test_options_that_a_kind_has_no_use_for_are_refused(capsys):
    parse_arguments = loaded(SCRIPTS / "gpu_bench/tune.py").parse_arguments
    assert parse_arguments(["attention", "--cache-bytes", "1"]).cache_bytes == [1]
    for given, said in (
        (["experts", "--tokens", "2"], "unrecognized arguments: --tokens 2"),
        (["attention", "--models", "qwen3,qwen9"], "qwen9; known: qwen3, llama"),
        (["attention", "--cache-bytes", "3"], "3; known: 2, 1"),
        (["dense", "--shapes", "8x"], "'8x' isn't ROWSxINPUTS"),
        (["few", "--shapes", "8x8:relu"], "unknown relu"),
    ):
        with pytest.raises(SystemExit):
            parse_arguments(given)
        assert said in capsys.readouterr().err


def loaded(path: Path):
    """As a part of the package that tables are parts of."""
    name = f"ringcast.kernels.gpu.{path.stem}_copy"
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
