"""`ringcast models` and `ringcast pull`, as a person and as a script see them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ringcast.frontend.cli import models, pull
from ringcast.frontend.cli.main import main
from ringcast.frontend.hub.catalogue import CATALOGUE
from ringcast.mq.config import DEFAULT_MODEL


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RINGCAST_CACHE", str(tmp_path))
    return tmp_path


def test_models_when_piped(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models"]) == 0
    heading, *rows = capsys.readouterr().out.splitlines()
    assert heading.split("\t") == ["name", "parameters", "size", "download", "license", "where"]
    assert [row.split("\t")[0] for row in rows] == list(CATALOGUE)
    assert DEFAULT_MODEL in CATALOGUE
    assert {row.split("\t")[-1] for row in rows} == {"not pulled"}


def test_models_on_a_terminal(
    cache: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models.sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["models"]) == 0
    shown = capsys.readouterr().out
    assert DEFAULT_MODEL in shown
    assert "not pulled" in shown
    assert "\t" not in shown


def test_models_as_json(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "--json"]) == 0
    model = next(m for m in json.loads(capsys.readouterr().out) if m["name"] == DEFAULT_MODEL)
    assert model["name"] == DEFAULT_MODEL
    assert model["num_parameters"] == 134515008
    assert model["pulled"] is False
    assert model["path"] == str(cache / "models" / DEFAULT_MODEL)


def test_pull_says_where(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def fake(model: str, revision: str | None, on_progress: object) -> Path:
        asked.append((model, revision))
        return Path("/models/it")

    monkeypatch.setattr(pull, "pull_model", fake)
    assert main(["pull", "org/it", "--revision", "v2"]) == 0
    assert capsys.readouterr().out == "org/it: /models/it\n"
    assert main(["pull"]) == 0
    assert asked == [("org/it", "v2"), (DEFAULT_MODEL, None)]


def test_pull_of_nothing(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pull", "smollm"]) == 2
    assert capsys.readouterr().err.startswith("ringcast: no model 'smollm': a model is a name")
    assert main(["pull", str(cache)]) == 2
    assert capsys.readouterr().err.startswith(f"ringcast: no config.json in {cache}")
