"""Replicas that come and go: every way through a scale, and what a death does to it."""

from __future__ import annotations

import pytest

from ringcast.actors import effects as fx
from ringcast.actors.elastic import ElasticLifecycle
from ringcast.actors.lifecycle import State
from ringcast.actors.scaling import new_units
from ringcast.actors.topology import counts_for, units

STAY = ("client.0", "tokenizer.0", "detokenizer.0")


def kinds(effects):
    return [type(effect).__name__ for effect in effects]


def only(effects, kind):
    return [effect for effect in effects if isinstance(effect, kind)]


class Served:
    """A topology that serves, and obeys: who is told something answers it, if it can."""

    def __init__(self, replicas, **more):
        options = {
            "shutdown_timeout": 30.0,
            "max_restarts": 3,
            "startup_timeout": 60.0,
            "step_timeout": 5.0,
        }
        self.counts = counts_for(replicas, 1)
        self.life = ElasticLifecycle(units(self.counts), ["client.0"], **{**options, **more})
        self.room = True  # for channels
        self.started: list[str] = []
        self.ended: list[fx.ScaleEnded] = []
        self.life.begin(0.0)
        for actors in units(self.counts).values():
            for actor in actors:
                self.life.ready(actor, 1.0)
        self.life.listening("client.0")
        assert self.life.state is State.SERVING

    def scale(self, replicas, drain_seconds=10.0):
        new = new_units(self.counts, replicas)
        return self.note(self.life.scale(replicas, new, drain_seconds))

    def note(self, effects):
        self.started += [actor for start in only(effects, fx.Start) for actor in start.actors]
        self.ended += only(effects, fx.ScaleEnded)
        if not only(effects, fx.Connect):
            return list(effects)
        done = self.life.connected() if self.room else self.life.cannot_connect("no room")
        return [*effects, *self.note(done)]

    def answer(self, effects, but=()):
        """All that follows when everyone answers what it is told, and so on."""
        out = []
        for effect in effects:
            told = [] if not isinstance(effect, fx.TellAdded | fx.TellLost) else effect.to
            for actor in told:
                if actor not in but:
                    number = effect.number if isinstance(effect, fx.TellAdded) else effect.death
                    out += self.note(self.life.forgotten(actor, number))
            if isinstance(effect, fx.Stop):
                for actor in effect.actors:
                    out += self.die(actor, "exit status 0")
        return out + self.answer(out, but) if out else []

    def die(self, actor, error="killed"):
        return self.note(self.life.died(actor, error, now=50.0))

    def get_ready(self, *actors):
        out = []
        for actor in actors:
            out += self.note(self.life.ready(actor, 60.0))
        return out + self.answer(out)


# --- more -----------------------------------------------------------------------------------------


def test_a_new_replica_is_used_once_all_know_it_and_it_is_ready():
    topology = Served(1)
    effects = topology.scale(2)
    assert only(effects, fx.Connect) == [fx.Connect(("worker.1", "scheduler.1", "coordinator.0"))]
    told = only(effects, fx.TellAdded)
    assert [(set(tell.to), tell.added) for tell in told] == [
        ({"scheduler.0", *STAY}, ("worker.1", "scheduler.1")),
        ({"scheduler.0", *STAY}, ("coordinator.0",)),
    ]
    assert not topology.started
    topology.answer(effects, but=["tokenizer.0"])
    assert not topology.started
    for tell in told:
        topology.note(topology.life.forgotten("tokenizer.0", tell.number))
    assert topology.started == ["worker.1", "scheduler.1", "coordinator.0"]
    assert topology.life.num_replicas == 1
    effects = topology.get_ready("worker.1", "scheduler.1")
    assert {tell.names for tell in only(effects, fx.TellBack)} == {("worker.1", "scheduler.1")}
    assert (topology.life.num_replicas, topology.ended) == (2, [])
    topology.get_ready("coordinator.0")
    assert topology.ended == [fx.ScaleEnded(2, "")]
    assert topology.life.scaling_to == 0


def test_who_does_not_answer_is_killed_like_one_that_ignores_a_death():
    topology = Served(1)
    effects = topology.scale(2)
    timers = [timer.key for timer in only(effects, fx.Timer) if "tokenizer.0" in timer.key]
    assert topology.life.timer(timers[0], 20.0) == [fx.Kill(("tokenizer.0",))]


def test_it_waits_for_who_is_starting_which_would_have_no_channels():
    topology = Served(1)
    topology.answer(topology.die("tokenizer.0"))
    assert topology.started == ["tokenizer.0"]
    assert topology.scale(2) == []
    effects = topology.get_ready("tokenizer.0")
    assert only(effects, fx.Connect)
    assert "tokenizer.0" in only(effects, fx.TellAdded)[0].to


def test_without_room_for_its_channels_there_is_no_new_replica():
    topology = Served(1)
    topology.room = False
    effects = topology.scale(2)
    assert kinds(effects) == ["Connect", "ScaleEnded"]
    assert topology.ended == [fx.ScaleEnded(1, "no room")]
    assert topology.life.refusal(2) is None
    topology.room = True
    topology.answer(topology.scale(2))
    topology.get_ready("worker.1", "scheduler.1", "coordinator.0")
    assert topology.ended[1:] == [fx.ScaleEnded(2, "")]


def test_who_starts_after_it_was_connected_is_told_that_it_is_down():
    topology = Served(1)
    effects = topology.scale(2)
    topology.answer(topology.die("tokenizer.0"))
    topology.answer(effects)
    told = [
        (tell.lost, tell.removed)
        for tell in only(topology.get_ready("tokenizer.0"), fx.TellLost)
        if tell.to == ("tokenizer.0",)
    ]
    assert (("worker.1", "scheduler.1"), False) in told
    topology.get_ready("worker.1", "scheduler.1", "coordinator.0")
    assert topology.ended == [fx.ScaleEnded(2, "")]


@pytest.mark.parametrize("user_error", [False, True])
@pytest.mark.parametrize("max_restarts", [0, 3])
def test_a_new_replica_that_dies_takes_all_new_ones_with_it(user_error, max_restarts):
    topology = Served(1, max_restarts=max_restarts)
    topology.answer(topology.scale(3))
    topology.get_ready("worker.1", "scheduler.1")
    effects = topology.note(
        topology.life.died("worker.2", "no room", user_error=user_error, now=70.0)
    )
    assert fx.Kill(("scheduler.2",)) in effects
    assert not only(effects, fx.TellFailed)
    effects += topology.die("scheduler.2")
    effects += topology.answer(effects)
    leaving = only(effects, fx.TellLeaving)
    assert [tell.names for tell in leaving] == [("worker.1", "scheduler.1")]
    assert fx.Stop(("coordinator.0",)) in effects
    effects = topology.note(topology.life.left("client.0"))
    effects += topology.answer(effects)
    (gone,) = only(effects, fx.Disconnect)
    assert set(gone.actors) == {
        *("worker.1", "scheduler.1", "worker.2", "scheduler.2", "coordinator.0")
    }
    assert topology.ended == [fx.ScaleEnded(1, "no room")]
    assert topology.life.state is State.SERVING
    topology.answer(topology.scale(2))
    topology.get_ready("worker.1", "scheduler.1", "coordinator.0")
    assert topology.ended[1:] == [fx.ScaleEnded(2, "")]


def test_a_new_replica_that_is_too_slow_is_a_death_too():
    topology = Served(1)
    effects = topology.scale(2)
    effects += topology.answer(effects)
    (timer,) = [t for t in only(effects, fx.Timer) if t.key.startswith("startup engine.1")]
    (kill,) = topology.life.timer(timer.key, 99.0)
    effects = [effect for actor in kill.actors for effect in topology.die(actor)]
    topology.answer(effects)
    (ended,) = topology.ended
    assert (ended.replicas, "--startup-timeout" in ended.error) == (1, True)
    assert topology.life.timer(timer.key, 99.0) == []


def test_one_that_has_been_up_is_restarted_while_others_are_added():
    topology = Served(1)
    topology.answer(topology.scale(3))
    topology.get_ready("worker.1", "scheduler.1", "coordinator.0")
    effects = topology.die("worker.1")
    effects += topology.die("scheduler.1")
    topology.started.clear()
    topology.answer(effects)
    assert topology.started == ["worker.1", "scheduler.1"]
    topology.get_ready("worker.2", "scheduler.2")
    assert topology.ended == [fx.ScaleEnded(3, "")]


# --- fewer ----------------------------------------------------------------------------------------


def test_a_replica_leaves_when_no_client_uses_it():
    topology = Served(3)
    effects = topology.scale(1)
    assert kinds(effects) == ["TellLeaving", "Timer"]
    assert effects[0].names == ("worker.1", "scheduler.1", "worker.2", "scheduler.2")
    assert topology.life.num_replicas == 1
    effects = topology.note(topology.life.left("client.0"))
    assert [stop.actors for stop in only(effects, fx.Stop)] == [
        ("worker.1", "scheduler.1"),
        ("worker.2", "scheduler.2"),
    ]
    for actor in ("worker.1", "worker.2", "scheduler.1", "scheduler.2"):
        last = topology.die(actor, "exit status 0")
    (told,) = only(last, fx.TellLost)
    assert (told.removed, set(told.to)) == (True, {"scheduler.0", "coordinator.0", *STAY})
    assert not topology.ended
    for death in (-1, -2):
        for actor in told.to:
            effects = topology.note(topology.life.forgotten(actor, death))
    assert fx.Disconnect(("worker.1", "scheduler.1", "worker.2", "scheduler.2")) in effects
    assert topology.ended == [fx.ScaleEnded(1, "")]
    assert not topology.started


def test_it_is_not_waited_for_clients_for_ever_nor_for_who_does_not_end():
    topology = Served(2)
    (deadline,) = only(topology.scale(1, drain_seconds=7.0), fx.Timer)
    assert deadline.seconds == 7.0
    effects = topology.note(topology.life.timer(deadline.key, 20.0))
    (late,) = only(effects, fx.Timer)
    topology.die("worker.1", "exit status 0")
    assert topology.life.timer(late.key, 30.0) == [fx.Kill(("scheduler.1",))]
    topology.answer(topology.die("scheduler.1"))
    assert topology.ended == [fx.ScaleEnded(1, "")]
    assert topology.life.timer(late.key, 40.0) == []


def test_one_that_dies_while_it_leaves_is_told_as_a_death_and_not_restarted():
    topology = Served(2)
    topology.scale(1)
    effects = topology.die("worker.1")
    effects += topology.die("scheduler.1")
    effects += topology.answer(effects)
    removed = [(tell.death > 0, tell.removed) for tell in only(effects, fx.TellLost)]
    assert removed == [(True, False), (False, True)]
    assert not topology.started
    assert topology.ended == [fx.ScaleEnded(1, "")]


def test_a_client_that_dies_has_left_and_its_next_incarnation_is_told():
    topology = Served(2)
    topology.scale(1)
    effects = topology.die("client.0")
    topology.answer(effects)
    assert (topology.ended, topology.started) == ([], ["client.0"])
    effects = topology.get_ready("client.0")
    told = [tell for tell in only(effects, fx.TellLost) if tell.to == ("client.0",)]
    assert [(tell.lost, tell.removed) for tell in told] == [(("worker.1", "scheduler.1"), True)]
    assert topology.ended == [fx.ScaleEnded(1, "")]


def test_the_last_one_that_stays_is_not_given_up_for_one_that_leaves():
    topology = Served(2, max_restarts=1)
    topology.scale(1)
    topology.life.died("worker.0", "boom", user_error=True, now=50.0)
    assert topology.life.state in (State.FAILING, State.STOPPING)


def test_an_end_ends_the_scale_with_its_reason():
    topology = Served(2)
    topology.scale(1)
    effects = topology.note(topology.life.stop())
    assert kinds(effects) == ["ScaleEnded", "Drain", "Timer"]
    assert topology.ended == [fx.ScaleEnded(2, "the server is shutting down")]


def test_one_scale_at_a_time_and_none_that_leaves_nobody():
    topology = Served(2)
    assert topology.life.refusal(1) is None
    topology.life.died("worker.0", "boom", user_error=True, now=50.0)
    why, status = topology.life.refusal(1)
    assert (status, "engine.0 is down for good" in why) == (409, True)
    topology = Served(2)
    topology.scale(1)
    assert topology.life.refusal(3) == ("a scale to --replicas 1 is under way", 409)
    topology.life.stop()
    assert topology.life.refusal(3)[1] == 503
