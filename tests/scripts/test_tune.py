"""What scripts/tune tries, and the table that it writes."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from pathlib import Path

import pytest

from ringcast.kernels.gpu import batch_linear_table, tile_linear
from ringcast.kernels.gpu.batch_linear_table import MULTIPROCESSORS, TUNED, Config

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
TILE = Config(128, 128, 64, 4, 8, 3, 4, swap=False, tma=True)


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS / "gpu_bench"))


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


def test_the_table_is_written_in_place(tmp_path):
    from dense_search import write_table

    path = Path(shutil.copy(batch_linear_table.__file__, tmp_path / "table.py"))
    write_table(path, TUNED)
    again = loaded(path)
    assert {key: found for key, found in TUNED.items() if any(found.values())} == again.TUNED
    tuned = TUNED | {(8, 16, True): {64: TILE, 2: None}, (8, 24, False): {2: None}}
    write_table(path, tuned)
    assert again.TUNED | {(8, 16, True): {2: None, 64: tuple(TILE)}} == loaded(path).TUNED
    ours, theirs = Path(batch_linear_table.__file__).read_text(), path.read_text()
    assert theirs.partition("\nTUNED: ")[0] == ours.partition("\nTUNED: ")[0]
    assert theirs.partition("\n\n\ndef ")[2] == ours.partition("\n\n\ndef ")[2] != ""


def test_a_file_without_a_table_is_left_alone(tmp_path):
    from dense_search import replace_tuned

    path = tmp_path / "table.py"
    path.write_text("TUNED = {}\n")
    with pytest.raises(ValueError, match="has no TUNED"):
        replace_tuned(path, [])
    assert path.read_text() == "TUNED = {}\n"


def loaded(path: Path):
    spec = importlib.util.spec_from_file_location("table", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules.pop("table", None)
    spec.loader.exec_module(module)
    return module
