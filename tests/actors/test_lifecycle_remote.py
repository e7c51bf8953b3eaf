"""Units whose work is on another host: it may be away for as long and as often as it likes."""

from __future__ import annotations

from ringcast.actors import effects as fx
from ringcast.actors.lifecycle import Lifecycle, State

UNITS = {
    "engine.0": ("worker.0", "scheduler.0"),
    "engine.1": ("scheduler.1",),
    "client.0": ("client.0",),
}
ACTORS = tuple(actor for actors in UNITS.values() for actor in actors)


def make(remote=("engine.1",)) -> Lifecycle:
    return Lifecycle(
        UNITS,
        ("client.0",),
        remote=remote,
        shutdown_timeout=30.0,
        max_restarts=2,
        startup_timeout=60.0,
        step_timeout=5.0,
    )


def serving(**options) -> Lifecycle:
    life = make(**options)
    life.begin(0.0)
    for actor in ACTORS:
        life.ready(actor, 1.0)
    life.listening("client.0")
    assert life.state is State.SERVING
    return life


def only(effects, kind):
    return [effect for effect in effects if isinstance(effect, kind)]


def lose(life, now, **how):
    """The gateway ends, all who are told answer, and its back-off passes."""
    effects = list(life.died("scheduler.1", "node a is gone", now=now, **how))
    for told in only(effects, fx.TellLost):
        for actor in told.to:
            effects += life.forgotten(actor, told.death)
    for timer in only(effects, fx.Timer):
        if timer.key.startswith("back-off"):
            effects += life.timer(timer.key, now + timer.seconds)
    return effects


def test_a_node_that_never_comes_is_named_by_its_rank():
    life = make()
    life.begin(0.0)
    for actor in ACTORS[:2]:
        life.ready(actor, 1.0)
    life.ready("client.0", 1.0)
    assert life.timer("startup", 60.0) == [fx.Kill(("scheduler.1",))]
    (told,) = only(life.died("scheduler.1", "SIGKILL", now=60.0), fx.TellFailed)
    assert "scheduler.1: not ready after 60 s (--startup-timeout)" in told.error
    assert "no headless host has joined with rank 1" in told.error


def test_once_all_serve_a_node_may_stay_away():
    life = serving()
    effects = lose(life, 100.0, from_outside=True)
    assert only(effects, fx.Start) == [fx.Start(("scheduler.1",))]
    assert not [timer for timer in only(effects, fx.Timer) if "startup" in timer.key]
    (back,) = only(life.ready("scheduler.1", 1e6), fx.TellBack)
    assert back.names == ("scheduler.1",)


def test_a_node_that_comes_and_goes_ends_nobody_else():
    life = serving()
    for number in range(20):
        effects = lose(life, 100.0 + number / 10, user_error=bool(number % 2))
        assert only(effects, fx.Start), number
        life.ready("scheduler.1", 100.0 + number / 10)
    assert life.state is State.SERVING
    assert not life.given_up


def test_the_same_of_a_unit_that_is_here_is_once_too_often():
    life = serving(remote=())
    for number in range(3):
        lose(life, 100.0 + number / 10)
        life.ready("scheduler.1", 100.0 + number / 10)
    assert life.given_up == {"scheduler.1"}


def test_a_replica_that_waits_for_a_node_is_no_reason_to_do_without_the_last_one_here():
    life = serving()
    lose(life, 100.0)
    life.died("worker.0", "bad option", user_error=True, now=101.0)
    assert life.state is State.FAILING
    life = serving()
    life.died("worker.0", "bad option", user_error=True, now=101.0)
    assert life.given_up == {"worker.0", "scheduler.0"}


def test_who_asks_for_the_end_of_all_gets_it_with_its_exit_code():
    life = serving(remote=())
    assert only(lose(life, 100.0, exit_code=75), fx.TellFailed)
    life.drained("client.0")
    for actor in ACTORS:
        effects = life.died(actor, "gone", now=101.0)
    assert effects[-1] == fx.Exit(75)


def test_who_cannot_launch_nodes_ends_the_start_and_nothing_later():
    for user_error, code in ((True, 2), (False, 1)):
        life = make()
        life.begin(0.0)
        life.ready("client.0", 1.0)
        told, stop, *_ = life.cannot_launch("no Ray", user_error)
        assert told == fx.TellFailed("launcher", "no Ray", "", user_error)
        assert stop == fx.StopAll()
        assert life.exit_code == code
        assert life.cannot_launch("no Ray", user_error) == []
    assert serving().cannot_launch("no Ray", True) == []
