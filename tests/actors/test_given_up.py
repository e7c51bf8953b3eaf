"""A replica that can't be kept alive: the others go on without it, and the last one is missed."""

import pytest

from ringcast.actors import effects as fx
from ringcast.actors import topology
from ringcast.actors.lifecycle import Lifecycle, State

UNITS = topology.units(topology.counts_for(replicas=2, ranks=1))


def serving(max_restarts=1, units=UNITS):
    life = Lifecycle(
        units,
        ["client.0"],
        shutdown_timeout=30.0,
        max_restarts=max_restarts,
        startup_timeout=60.0,
        step_timeout=5.0,
    )
    life.begin(0.0)
    for actors in units.values():
        for actor in actors:
            life.ready(actor, 1.0)
    life.listening("client.0")
    assert life.state is State.SERVING
    return life


def lose(life, replica, now, **more):
    """Its worker dies, and then its scheduler, as killed; everybody answers."""
    effects = list(life.died(f"worker.{replica}", "boom", now=now, **more))
    if fx.Kill((f"scheduler.{replica}",)) in effects:
        effects += life.died(f"scheduler.{replica}", "killed", now=now)
    for told in [effect for effect in effects if isinstance(effect, fx.TellLost)]:
        for actor in told.to:
            effects += life.forgotten(actor, told.death)
    return effects


def only(effects, kind):
    return [effect for effect in effects if isinstance(effect, kind)]


def test_a_death_too_many_is_final_and_nothing_ends():
    life = serving()
    assert not only(lose(life, 0, 100.0), fx.TellLost)[0].final
    effects = lose(life, 0, 100.5)
    (told,) = only(effects, fx.TellLost)
    assert told.final
    assert "engine.0 has died 2 times in a row (--max-restarts 1)" in told.error
    assert not only(effects, fx.Start)
    for timer in only(effects, fx.Timer):
        assert not only(life.timer(timer.key, 200.0), fx.Start)
    assert life.state is State.SERVING
    assert life.given_up == {"worker.0", "scheduler.0"}


def test_a_mistake_at_a_restart_is_final_too():
    life = serving()
    lose(life, 1, 100.0)
    (told,) = only(lose(life, 1, 100.5, user_error=True), fx.TellLost)
    assert told.final
    assert life.state is State.SERVING


def test_the_last_replica_is_missed():
    life = serving()
    for replica in (0, 1):
        for now in (100.0, 100.5):
            effects = lose(life, replica, now)
    assert "engine.1 has died 2 times" in only(effects, fx.TellFailed)[0].error
    assert life.exit_code == 1


def test_others_die_and_come_back_without_it():
    life = serving()
    for now in (100.0, 100.5):
        lose(life, 0, now)
    effects = lose(life, 1, 200.0)
    assert only(effects, fx.Start) == [fx.Start(("worker.1", "scheduler.1"))]
    life.ready("worker.1", 201.0)
    effects = list(life.ready("scheduler.1", 201.0))
    (told,) = only(effects, fx.TellLost)  # what has started is told of who is not there
    assert (told.to, told.lost, told.final) == (("scheduler.1",), ("worker.0", "scheduler.0"), True)
    effects = life.forgotten("scheduler.1", told.death)
    assert only(effects, fx.TellBack)[0].names == ("worker.1", "scheduler.1")


def test_it_is_not_waited_for_at_the_end():
    life = serving()
    for now in (100.0, 100.5):
        lose(life, 0, now)
    life.stop()
    effects = life.drained("client.0")
    assert only(effects, fx.StopAll)
    left = [a for actors in UNITS.values() for a in actors if a not in life.given_up]
    for actor in left:
        effects = life.died(actor, "gone", now=300.0)
    assert only(effects, fx.Exit) == [fx.Exit(0)]


def test_without_restarts_any_death_ends_everything():
    assert only(lose(serving(max_restarts=0), 0, 100.0), fx.TellFailed)


@pytest.mark.parametrize("kind", ["tokenizer", "detokenizer"])
def test_a_text_actor_is_given_up_while_there_is_another(kind):
    counts = {**topology.counts_for(replicas=1, ranks=1), kind: 2}
    life = serving(units=topology.units(counts))
    for now in (100.0, 100.5):
        effects = list(life.died(f"{kind}.1", "boom", now=now))
        (told,) = only(effects, fx.TellLost)
        for actor in told.to:
            effects += life.forgotten(actor, told.death)
    assert told.final
    assert not only(effects, fx.Start)
    assert life.given_up == {f"{kind}.1"}
    for now in (200.0, 200.5):
        effects = list(life.died(f"{kind}.0", "boom", now=now))
        for told in only(effects, fx.TellLost):
            for actor in told.to:
                effects += life.forgotten(actor, told.death)
    assert f"{kind}.0 has died 2 times" in only(effects, fx.TellFailed)[0].error
