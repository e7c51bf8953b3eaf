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


# An engine of which a part is on another host


SHARED = ("worker.0", "scheduler.0", "gateway.1")


def sharing(units=None, clients=("client.0",)) -> Lifecycle:
    return Lifecycle(
        units or {"engine.0": SHARED, "client.0": ("client.0",)},
        clients,
        remote=("engine.0",),
        shared=("engine.0",),
        shutdown_timeout=30.0,
        max_restarts=2,
        startup_timeout=60.0,
        step_timeout=5.0,
    )


def sharing_and_serving() -> Lifecycle:
    life = sharing()
    life.begin(0.0)
    for actor in (*SHARED, "client.0"):
        life.ready(actor, 1.0)
    life.listening("client.0")
    assert life.state is State.SERVING
    return life


def die(life, actor, now, **how):
    """Of a unit that was being started: all it has is killed, and it may start again at once."""
    effects = list(life.died(actor, f"{actor} is gone", now=now, **how))
    for other in SHARED:
        if other != actor and life.state is State.SERVING:
            effects += life.died(other, "killed", now=now)
    for told in only(effects, fx.TellLost):
        for told_actor in told.to:
            effects += life.forgotten(told_actor, told.death)
    for timer in only(effects, fx.Timer):
        if timer.key.startswith("back-off"):
            effects += life.timer(timer.key, now + timer.seconds)
    return effects


def test_a_lost_node_may_be_away_for_as_long_and_as_often_as_it_likes():
    life = sharing_and_serving()
    for turn in range(20):
        effects = die(life, "gateway.1", 2.0 + turn, from_outside=True)
        assert only(effects, fx.Start) == [fx.Start(SHARED)]
        assert not any(timer.key.startswith("startup") for timer in only(effects, fx.Timer))
    assert life.state is State.SERVING


def test_a_worker_that_dies_too_often_ends_all():
    life = sharing_and_serving()
    for turn in range(2):
        assert only(die(life, "worker.0", 1.5 + turn), fx.Start)
    (failed,) = only(die(life, "worker.0", 4.0), fx.TellFailed)
    assert "engine.0 has died 3 times in a row" in failed.error


def test_a_node_that_never_comes_is_named_by_its_number():
    life = sharing()
    life.begin(0.0)
    life.ready("client.0", 1.0)
    life.timer("startup", 60.0)
    (failed,) = only(life.died("gateway.1", "killed", now=60.0), fx.TellFailed)
    assert failed.error.endswith("no headless host has joined as node 1")


def test_a_host_with_nothing_but_a_part_waits_for_any_time():
    life = sharing({"engine.0": ("worker.1", "gateway.1")}, ("gateway.1",))
    assert life.begin(0.0) == [fx.Start(("worker.1", "gateway.1"))]


def test_what_such_a_host_has_ends_at_once_when_it_has_to_join_again():
    life = sharing({"engine.0": ("worker.1", "gateway.1")}, ("gateway.1",))
    life.begin(0.0)
    life.ready("gateway.1", 1.0)
    effects = life.died("gateway.1", "the master is gone", exit_code=75, now=2.0)
    assert effects[-1] == fx.KillAll()
    assert life.died("worker.1", "killed", now=2.0)[-1] == fx.Exit(75)
