"""What scripts/conformance and scripts/abuse consist of, without a server."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS))


def test_every_client_has_a_program_and_its_servers() -> None:
    import conformance

    programs = {path.name for path in conformance.PROGRAMS.glob("*_client.py")}
    assert programs == {f"{name}_client.py" for name in conformance.CLIENTS}
    for client in conformance.CLIENTS.values():
        assert set(client.servers) <= set(conformance.SERVERS)
        assert all("==" in requirement for requirement in client.requirements)


def test_a_program_that_breaks_down_has_failed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import conformance

    class NoServers:
        def url(self, name: str) -> str:
            return f"http://{name}"

    monkeypatch.setattr(conformance, "PROGRAMS", tmp_path)
    monkeypatch.setattr(conformance, "tokenizer_folder", lambda: "")
    program = tmp_path / "openai_client.py"

    def run() -> list[dict[str, Any]]:
        return conformance.run("openai", Path(sys.executable), NoServers(), tmp_path)

    program.write_text("raise SystemExit('no such thing')")
    (case,) = run()
    assert case["verdict"] == "failed"
    assert "no such thing" in case["about"]
    program.write_text("")  # nothing was tried
    assert [case["verdict"] for case in run()] == ["failed"]


def test_the_first_of_nested_errors_is_told() -> None:
    import abuse

    nested = ExceptionGroup("a", [ExceptionGroup("b", [ValueError("the cause")])])
    assert abuse.first_of(nested) == "ValueError: the cause"
