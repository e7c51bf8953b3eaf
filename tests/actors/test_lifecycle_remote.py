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


def make(remote=("scheduler.1",)) -> Lifecycle:
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


# An engine of which a part is on another host


SHARED = ("worker.0", "scheduler.0", "gateway.1")


def sharing(units=None, clients=("client.0",), remote=("gateway.1",), patient=False) -> Lifecycle:
    return Lifecycle(
        units or {"engine.0": SHARED, "client.0": ("client.0",)},
        clients,
        remote=remote,
        patient=patient,
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


def die(life, actor, now, others=SHARED, **how):
    """Of a unit that was being started: all it has is killed, and it may start again at once."""
    effects = list(life.died(actor, f"{actor} is gone", now=now, **how))
    for other in others:
        if other != actor and life.state in (State.STARTING, State.SERVING):
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
    life = sharing({"engine.0": ("worker.1", "gateway.1")}, ("gateway.1",), patient=True)
    assert life.begin(0.0) == [fx.Start(("worker.1", "gateway.1"))]
    assert life.ready("gateway.1", 1.0) == []  # the master may wait for another node


def test_a_node_that_is_lost_before_all_serve_is_waited_for_again_but_not_for_ever():
    life = sharing()
    life.begin(0.0)
    life.ready("gateway.1", 1.0)
    for turn in range(2):  # its link broke, which may have a reason here
        assert only(die(life, "gateway.1", 2.0 + turn), fx.Start)
    assert only(die(life, "gateway.1", 4.0), fx.TellFailed)
    life = sharing()
    life.begin(0.0)
    assert only(life.died("worker.0", "died", now=1.0), fx.TellFailed)


def test_what_is_here_has_its_time_from_when_the_last_node_is_there():
    shared = ("worker.0", "scheduler.0", "gateway.1", "gateway.2")
    life = sharing({"engine.0": shared, "client.0": ("client.0",)}, remote=shared[2:])
    life.begin(0.0)
    life.ready("client.0", 1.0)
    assert life.ready("gateway.2", 1.0) == []
    assert only(die(life, "gateway.2", 2.0, others=shared, from_outside=True), fx.Start)
    assert life.ready("gateway.1", 1e6) == []
    (timer,) = life.ready("gateway.2", 2e6)
    assert timer.seconds == 60.0
    assert life.timer(timer.key, 2e6 + 60) == [fx.Kill(("worker.0", "scheduler.0"))]


def test_what_such_a_host_has_ends_at_once_when_it_has_to_join_again():
    life = sharing({"engine.0": ("worker.1", "gateway.1")}, ("gateway.1",), patient=True)
    life.begin(0.0)
    life.ready("gateway.1", 1.0)
    effects = life.died("gateway.1", "the master is gone", exit_code=75, now=2.0)
    assert only(effects, fx.Kill) == [fx.Kill(("worker.1",))]
    assert life.died("worker.1", "killed", now=2.0)[-1] == fx.Exit(75)


# Replicas that step together: what is here and what stands for another host are one unit.

TOGETHER = {
    "engine.0": ("worker.0", "mirror.0", "scheduler.0", "scheduler.1"),
    "client.0": ("client.0",),
    "tokenizer.0": ("tokenizer.0",),
}
IN_ORDER = ("client.0", "worker.0", "tokenizer.0", "mirror.0", "scheduler.0", "scheduler.1")
UNIT = TOGETHER["engine.0"]


def make_together(units=TOGETHER, clients=("client.0",), **more) -> Lifecycle:
    options = {
        "remote": ("mirror.0", "scheduler.1"),
        "shutdown_timeout": 30.0,
        "max_restarts": 2,
        "startup_timeout": 60.0,
        "step_timeout": 5.0,
    }
    return Lifecycle(units, clients, **{**options, **more})


def serving_together() -> Lifecycle:
    life = make_together()
    life.begin(0.0)
    for actor in IN_ORDER:
        effects = life.ready(actor, 1.0)
    assert effects == [fx.OpenDoor(("client.0",))]
    life.listening("client.0")
    assert life.state is State.SERVING
    return life


def lose_all(life, actor, now, **how):
    """One of the unit dies, the rest is killed and reaped, all answer, and its back-off passes."""
    effects = list(life.died(actor, f"{actor} died", now=now, **how))
    for kill in only(effects, fx.Kill):
        for other in kill.actors:
            effects += life.died(other, "killed", now=now)
    for told in only(effects, fx.TellLost):
        for to in told.to:
            effects += life.forgotten(to, told.death)
    for timer in only(effects, fx.Timer):
        if timer.key.startswith("back-off"):
            effects += life.timer(timer.key, now + timer.seconds)
    return effects


def test_a_lost_host_takes_all_replicas_and_its_return_begins_their_time():
    life = serving_together()
    effects = lose_all(life, "mirror.0", 100.0, from_outside=True)
    assert only(effects, fx.Kill) == [fx.Kill(("worker.0", "scheduler.0", "scheduler.1"))]
    assert [set(told.lost) for told in only(effects, fx.TellLost)] == [set(UNIT)]
    assert only(effects, fx.Start) == [fx.Start(UNIT)]
    assert not [timer for timer in only(effects, fx.Timer) if "startup" in timer.key]
    (timer,) = life.ready("mirror.0", 1e6)  # whenever that is
    assert timer.seconds == 60.0
    assert life.timer(timer.key, 1e6 + 60) == [fx.Kill(("worker.0", "scheduler.0", "scheduler.1"))]
    life = serving_together()
    lose_all(life, "scheduler.1", 100.0)
    life.ready("mirror.0", 1e6)
    for actor in ("worker.0", "scheduler.0"):
        assert life.ready(actor, 1e6) == []
    (back,) = life.ready("scheduler.1", 1e6)
    assert back.names == UNIT


def test_a_host_that_comes_and_goes_gives_nothing_up_and_what_dies_here_too_often_does():
    life = serving_together()
    for number in range(20):
        effects = lose_all(life, ("mirror.0", "scheduler.1")[number % 2], 100.0 + number / 10)
        assert only(effects, fx.Start), number
    for number in range(2):
        assert only(lose_all(life, "worker.0", 110.0 + number / 10), fx.Start)
        assert only(lose_all(life, "mirror.0", 110.0 + number / 10), fx.Start)
    (failed,) = only(lose_all(life, "worker.0", 111.0), fx.TellFailed)
    assert "engine.0 has died 3 times in a row (--max-restarts 2)" in failed.error


def test_a_host_that_is_lost_before_all_serve_is_waited_for_again():
    life = make_together()
    life.begin(0.0)
    for actor in ("client.0", "mirror.0", "worker.0"):
        assert life.ready(actor, 1.0) == []
    effects = lose_all(life, "mirror.0", 2.0)
    assert only(effects, fx.TellLost)[0].to == ("client.0",)
    assert only(effects, fx.Start) == [fx.Start(UNIT)]
    (told, back) = late = life.ready("tokenizer.0", 3.0)  # it has opened its channels before
    assert isinstance(told, fx.TellLost), late
    assert isinstance(back, fx.Timer)
    effects = [effect for actor in UNIT for effect in life.ready(actor, 4.0)]
    (told_back,) = only(effects, fx.TellBack)
    assert (told_back.to, told_back.names) == (("client.0", "tokenizer.0"), UNIT)
    assert life.state is State.STARTING  # the tokenizer hasn't answered
    effects = life.forgotten("tokenizer.0", told.death)
    assert only(effects, fx.OpenDoor) == [fx.OpenDoor(("client.0",))]
    assert not only(effects, fx.Announce)


def test_who_is_ready_after_a_lost_host_is_back_hears_of_both():
    life = make_together()
    life.begin(0.0)
    life.ready("client.0", 1.0)
    lose_all(life, "mirror.0", 2.0)
    effects = [effect for actor in UNIT for effect in life.ready(actor, 3.0)]
    assert [told.to for told in only(effects, fx.TellBack)] == [("client.0",)]
    effects = life.ready("tokenizer.0", 4.0)
    (lost,), (back,) = only(effects, fx.TellLost), only(effects, fx.TellBack)
    assert (lost.to, lost.lost) == (back.to, back.names) == (("tokenizer.0",), UNIT)
    assert only(life.forgotten("tokenizer.0", lost.death), fx.OpenDoor)


def test_before_all_serve_a_death_here_is_the_end_and_so_is_a_host_that_never_comes():
    life = make_together()
    life.begin(0.0)
    life.ready("mirror.0", 1.0)
    assert only(life.died("worker.0", "died", now=1.0), fx.TellFailed)
    life = make_together()
    life.begin(0.0)
    (kill,) = life.timer("startup", 60.0)
    assert set(kill.actors) == {*IN_ORDER}
    (told,) = only(life.died("mirror.0", "SIGKILL", now=60.0), fx.TellFailed)
    assert "no headless host has joined with rank 1" in told.error
    life = make_together()
    life.begin(0.0)
    life.died("mirror.0", "node a is gone", now=59.0)
    (told,) = only(life.timer("startup", 60.0), fx.TellFailed)  # its unit is still being ended
    assert told.error == "node a is gone"
    life = make_together()
    life.begin(0.0)
    life.ready("mirror.0", 1.0)
    life.timer("startup", 60.0)
    (told,) = only(life.died("scheduler.1", "SIGKILL", now=60.0), fx.TellFailed)
    assert "no headless host" not in told.error


def test_a_node_waits_for_the_other_hosts_and_joins_again_with_all_it_has():
    units = {"engine.0": ("worker.1", "mirror.1", "scheduler.1", "gateway.1")}
    life = make_together(units, ("gateway.1",), remote=("mirror.1",), patient=True)
    assert not only(life.begin(0.0), fx.Timer)
    (timer,) = life.ready("mirror.1", 1e6)
    assert (timer.key, timer.seconds) == ("startup", 60.0)
    for actor in ("worker.1", "scheduler.1", "gateway.1"):
        life.ready(actor, 1e6)
    life.listening("gateway.1")
    effects = life.died("mirror.1", "the master has gone", now=1e6, exit_code=75)
    assert only(effects, fx.Kill) == [fx.Kill(("worker.1", "scheduler.1"))]
    assert only(effects, fx.StopAll)  # the gateway, too: it goes with its unit
    for actor in ("worker.1", "scheduler.1", "gateway.1"):
        effects = life.died(actor, "killed", now=1e6)
    assert effects[-1] == fx.Exit(75)
