"""The command line's entry: sub-commands, exit codes, one line for a mistake."""

from __future__ import annotations

import argparse
import subprocess
import sys
import types
from collections.abc import Callable

import pytest

from ringcast import __version__
from ringcast.frontend.cli import main as cli
from ringcast.mq.errors import (
    ChannelTimeout,
    ConfigError,
    EngineDeadError,
    InvalidRequestError,
    ModelLoadError,
    OverloadedError,
    UnknownModelError,
)

Install = Callable[[Callable[[argparse.Namespace], int]], None]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Install:
    """install(run): a command "do" with one option and an optional argument."""

    def install(run: Callable[[argparse.Namespace], int]) -> None:
        module = types.ModuleType("fake_command")

        def add_arguments(parser: argparse.ArgumentParser) -> None:
            parser.add_argument("--times", type=int, default=1)
            parser.add_argument("what", nargs="?")

        module.add_arguments, module.run = add_arguments, run  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "fake_command", module)
        monkeypatch.setitem(cli.COMMANDS, "do", ("fake_command", "do something"))

    return install


@pytest.mark.parametrize(
    "words", [["do", "it", "--times", "3"], ["do", "--times", "3", "it"], ["do", "--times=3", "it"]]
)
def test_runs_the_command_and_returns_its_status(install: Install, words: list[str]) -> None:
    seen = []

    def run(args: argparse.Namespace) -> int:
        seen.append((args.what, args.times))
        return 7

    install(run)
    assert cli.main(words) == 7
    assert seen == [("it", 3)]


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ConfigError("bad option"), 2),
        (ModelLoadError("no weights"), 2),
        (InvalidRequestError("bad prompt", "prompt"), 2),
        (UnknownModelError("no such model"), 2),
        (EngineDeadError("worker.0 died"), 1),
        (OverloadedError("full"), 1),
        (ChannelTimeout("slow"), 1),
    ],
)
def test_an_error_is_one_line(
    install: Install,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: Exception,
    status: int,
) -> None:
    def run(args: argparse.Namespace) -> int:
        raise error

    install(run)
    monkeypatch.delenv("RINGCAST_DEBUG", raising=False)
    assert cli.main(["do"]) == status
    assert capsys.readouterr().err == f"ringcast: {error}\n"

    monkeypatch.setenv("RINGCAST_DEBUG", "1")
    assert cli.main(["do"]) == status
    shown = capsys.readouterr().err
    assert shown.startswith("Traceback")
    assert shown.endswith(f"ringcast: {error}\n")


def test_other_exceptions_are_not_hidden(install: Install) -> None:
    def run(args: argparse.Namespace) -> int:
        raise ZeroDivisionError

    install(run)
    with pytest.raises(ZeroDivisionError):
        cli.main(["do"])


def test_ctrl_c(install: Install, capsys: pytest.CaptureFixture[str]) -> None:
    def run(args: argparse.Namespace) -> int:
        raise KeyboardInterrupt

    install(run)
    assert cli.main(["do"]) == 130
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ([], "required: COMMAND"),
        (["fly"], "invalid choice: 'fly'"),
        (["--fly"], "required: COMMAND"),
        (["do", "--tiems", "3"], "unrecognized arguments: --tiems"),
        (["do", "--time", "3"], "unrecognized arguments: --time"),
        (["do", "--times", "x"], "argument --times: invalid int value: 'x'"),
        (["do", "a", "b"], "unrecognized arguments: b"),
    ],
)
def test_command_lines_that_mean_nothing(
    install: Install, capsys: pytest.CaptureFixture[str], words: list[str], reason: str
) -> None:
    install(lambda args: 0)
    assert cli.main(words) == 2
    assert reason in capsys.readouterr().err


def test_version_and_help(install: Install, capsys: pytest.CaptureFixture[str]) -> None:
    install(lambda args: 0)
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"ringcast {__version__}\n"
    assert cli.main(["--help"]) == 0
    overview = capsys.readouterr().out
    for name, (_, line) in cli.COMMANDS.items():
        assert name in overview
        assert line in overview
    assert cli.main(["do", "--help"]) == 0
    assert "usage: ringcast do [-h] [--times TIMES] [what]" in capsys.readouterr().out


def test_a_reader_that_stops_reading() -> None:
    code = (
        "import sys, types\n"
        "from ringcast.frontend.cli import main as cli\n"
        "module = sys.modules['fake'] = types.ModuleType('fake')\n"
        "module.add_arguments = lambda parser: None\n"
        "module.run = lambda args: [print('x' * 1000) for _ in range(1000)] and 0\n"
        "cli.COMMANDS['do'] = ('fake', 'do')\n"
        "sys.exit(cli.main(['do']))\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        assert child.stderr is not None
        child.stdout.close()
        assert child.stderr.read() == b""
    assert child.returncode == 1


def test_the_script_is_installed_and_imports_nothing_heavy() -> None:
    code = (
        "import sys\n"
        "from importlib.metadata import entry_points\n"
        "(script,) = entry_points(group='console_scripts', name='ringcast')\n"
        "sys.argv[1:] = ['models']\n"
        "assert script.load()() == 0\n"
        "heavy = {'torch', 'transformers', 'huggingface_hub', 'numba'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    result = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "smollm2-135m-instruct" in result.stdout
