"""What `ringcast serve` says while it runs."""

import pytest

from ringcast.actors.effects import TellFailed, TellLost
from ringcast.frontend.cli.progress import StartProgress
from ringcast.frontend.cli.serve import ConsoleReporter, exposure
from ringcast.mq.server_config import ServerConfig

TRACEBACK = "Traceback (most recent call last):\nZeroDivisionError: division by zero\n"


def reporter():
    progress = StartProgress()
    progress.stop()
    return ConsoleReporter(progress, "tiny", 0.0)


def test_a_death_and_the_return_are_a_line_each(capsys):
    told = reporter()
    error = "worker.0 (pid 7) died: signal SIGKILL"
    told.lost(TellLost((), 1, "worker.0", error, "", ("worker.0", "scheduler.0")))
    told.back(("worker.0", "scheduler.0"), 1.234)
    assert capsys.readouterr().err.splitlines() == [
        "worker.0 (pid 7) died: signal SIGKILL; restarting worker.0 and scheduler.0",
        "worker.0 and scheduler.0 back after 1.2 s",
    ]


def test_the_childs_own_traceback_comes_first(capsys):
    told = reporter()
    told.lost(TellLost((), 1, "worker.0", "worker.0 died", TRACEBACK, ("worker.0",)))
    told.failed(TellFailed("worker.0", "worker.0 died", TRACEBACK, False))
    assert capsys.readouterr().err == (
        TRACEBACK + "worker.0 died; restarting worker.0\n" + TRACEBACK + "ringcast: worker.0 died\n"
    )


def test_a_users_mistake_needs_no_traceback(capsys):
    reporter().failed(TellFailed("worker.0", "no such file", TRACEBACK, True))
    assert capsys.readouterr().err == "ringcast: no such file\n"


@pytest.mark.parametrize("address", ["0.0.0.0", "::", "192.168.1.2", "fe80::1%eth0"])
def test_a_server_for_everybody_without_a_key_is_warned_of(address):
    assert "--api-key" in exposure(ServerConfig(host=address), address)
    assert exposure(ServerConfig(host=address, api_key=["secret"]), address) is None


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_a_server_for_this_machine_is_not(address):
    assert exposure(ServerConfig(), address) is None
