"""The supervisor's decisions: every way from start to end."""

import random

import pytest

from ringcast.actors import lifecycle
from ringcast.actors.lifecycle import Lifecycle, State

ACTORS = ("worker.0", "client.0", "scheduler.0")


def kinds(effects):
    return [type(effect).__name__ for effect in effects]


def serving(shutdown_timeout=30.0):
    life = Lifecycle(ACTORS, ["client.0"], shutdown_timeout)
    for actor in ACTORS:
        effects = life.ready(actor)
    assert kinds(effects) == ["OpenDoor"]
    assert kinds(life.listening("client.0")) == ["Announce"]
    assert life.state is State.SERVING
    return life


def end(life):
    effects = []
    for actor in ACTORS:
        effects = life.died(actor, "gone")
    return effects


def test_the_door_opens_only_when_all_are_ready():
    life = Lifecycle(ACTORS, ["client.0"], 30.0)
    assert life.ready("worker.0") == []
    assert life.ready("client.0") == []
    assert kinds(life.ready("scheduler.0")) == ["OpenDoor"]


def test_an_external_client_that_listens_before_the_last_is_ready_is_not_forgotten():
    life = Lifecycle(["worker.0"], ["client.0"], 0.0)
    assert life.listening("client.0") == []
    assert kinds(life.ready("worker.0")) == ["OpenDoor", "Announce"]


def test_stop_drains_then_stops_then_exits_with_zero():
    life = serving()
    assert kinds(life.stop()) == ["Drain", "Deadline"]
    assert kinds(life.drained("client.0")) == ["StopAll", "Deadline"]
    assert end(life) == [lifecycle.Exit(0)]


def test_a_second_stop_does_not_wait_for_the_drain_and_a_third_kills():
    life = serving()
    life.stop()
    assert kinds(life.stop()) == ["StopAll", "Deadline"]
    assert kinds(life.stop()) == ["KillAll"]


def test_without_a_shutdown_timeout_nothing_is_drained():
    life = serving(shutdown_timeout=0.0)
    assert kinds(life.stop()) == ["StopAll", "Deadline"]


def test_stop_while_starting_stops_at_once():
    life = Lifecycle(ACTORS, ["client.0"], 30.0)
    assert kinds(life.stop()) == ["StopAll", "Deadline"]
    assert end(life) == [lifecycle.Exit(0)]


def test_a_death_is_told_to_the_clients_before_anything_ends():
    life = serving()
    effects = life.died("worker.0", "boom", "the traceback")
    assert effects[0] == lifecycle.TellDeath("worker.0", "boom", "the traceback", False)
    assert kinds(effects) == ["TellDeath", "Deadline"]
    assert kinds(life.drained("client.0")) == ["StopAll", "Deadline"]
    assert end(life) == [lifecycle.Exit(1)]


def test_a_users_mistake_exits_with_two():
    life = Lifecycle(ACTORS, ["client.0"], 30.0)
    life.died("worker.0", "no such file", user_error=True)
    life.drained("client.0")
    assert end(life) == [lifecycle.Exit(2)]


def test_the_only_client_dying_leaves_nobody_to_wait_for():
    life = serving()
    assert kinds(life.died("client.0", "boom")) == ["TellDeath", "StopAll", "Deadline"]


def test_a_client_that_dies_while_draining_counts_as_failed():
    life = serving()
    life.stop()
    effects = life.died("client.0", "boom")
    assert kinds(effects) == ["TellDeath", "StopAll", "Deadline"]
    assert end(life) == [lifecycle.Exit(1)]


def test_an_old_deadline_does_nothing():
    life = serving()
    old = next(e for e in life.stop() if isinstance(e, lifecycle.Deadline))
    new = next(e for e in life.drained("client.0") if isinstance(e, lifecycle.Deadline))
    assert life.deadline_passed(old.generation) == []
    assert kinds(life.deadline_passed(new.generation)) == ["KillAll"]


@pytest.mark.parametrize("seed", range(200))
def test_any_order_of_events_ends_in_exactly_one_exit(seed):
    rng = random.Random(seed)
    life = Lifecycle(ACTORS, ["client.0"], rng.choice([0.0, 5.0]))
    alive, exits, generation = list(ACTORS), 0, 0
    for _ in range(200):
        event = rng.choice(["ready", "listen", "drained", "stop", "died", "deadline"])
        actor = rng.choice(ACTORS)
        if event == "died" and alive:
            effects = life.died(alive.pop(rng.randrange(len(alive))), "gone")
        elif event == "ready":
            effects = life.ready(actor)
        elif event == "listen":
            effects = life.listening("client.0")
        elif event == "drained":
            effects = life.drained("client.0")
        elif event == "deadline":
            effects = life.deadline_passed(generation)
        elif event == "stop" and life.state is not State.STOPPED:
            effects = life.stop()
        else:
            effects = []
        exits += sum(isinstance(e, lifecycle.Exit) for e in effects)
        generation = max(
            [generation, *(e.generation for e in effects if isinstance(e, lifecycle.Deadline))]
        )
    assert not alive
    assert exits == 1
