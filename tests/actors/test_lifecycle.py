"""The supervisor's decisions: every way from start to end, and every way back from a death."""

import random

import pytest

from ringcast.actors import effects as fx
from ringcast.actors.lifecycle import Lifecycle, State

UNITS = {
    "engine.0": ("worker.0", "scheduler.0"),
    "client.0": ("client.0",),
    "tokenizer.0": ("tokenizer.0",),
    "detokenizer.0": ("detokenizer.0",),
}
ACTORS = tuple(actor for actors in UNITS.values() for actor in actors)
LISTENERS = ("scheduler.0", "client.0", "tokenizer.0", "detokenizer.0")


def kinds(effects):
    return [type(effect).__name__ for effect in effects]


def only(effects, kind):
    return [effect for effect in effects if isinstance(effect, kind)]


def make(units=UNITS, clients=("client.0",), **more):
    options = {
        "shutdown_timeout": 30.0,
        "max_restarts": 3,
        "startup_timeout": 60.0,
        "step_timeout": 5.0,
    }
    return Lifecycle(units, clients, **{**options, **more})


def serving(**more):
    life = make(**more)
    first = life.begin(0.0)
    assert first[0] == fx.Start(tuple(life._unit_of))
    assert kinds(first) == ["Start", "Timer"]
    for actor in life._unit_of:
        effects = life.ready(actor, 1.0)
    assert kinds(effects) == ["OpenDoor"]
    for client in life._clients:
        effects = life.listening(client)
    assert kinds(effects) == ["Announce"]
    assert life.state is State.SERVING
    return life


def end(life):
    effects = []
    for actor in ACTORS:
        effects = life.died(actor, "gone", now=99.0)
    return effects


def answer(life, effects, skip=()):
    """What follows when everyone who was told of a death answers."""
    return [
        effect
        for told in only(effects, fx.TellLost)
        for actor in told.to
        if actor not in skip
        for effect in life.forgotten(actor, told.death)
    ]


def lose(life, actor, now=100.0):
    """An actor dies, its unit is reaped and all answer; what that leads to."""
    effects = list(life.died(actor, f"{actor} died", now=now))
    for kill in only(effects, fx.Kill):
        for other in kill.actors:
            effects += life.died(other, "killed", now=now)
    return effects + answer(life, effects)


def regain(life, actors, now=200.0):
    return [effect for actor in actors for effect in life.ready(actor, now)]


# --- start and end --------------------------------------------------------------------------------


def test_the_door_opens_only_when_all_are_ready():
    life = make()
    life.begin(0.0)
    for actor in ACTORS[:-1]:
        assert life.ready(actor, 1.0) == []
    assert life.ready(ACTORS[-1], 1.0) == [fx.OpenDoor(("client.0",))]


def test_an_external_client_that_listens_before_the_last_is_ready_is_not_forgotten():
    life = make({"engine.0": ("worker.0",)}, external=["client.0"])
    life.begin(0.0)
    assert life.listening("client.0") == []
    assert kinds(life.ready("worker.0", 1.0)) == ["OpenDoor", "Announce"]


def test_stop_drains_then_stops_then_exits_with_zero():
    life = serving()
    assert kinds(life.stop()) == ["Drain", "Timer"]
    assert kinds(life.drained("client.0")) == ["StopAll", "Timer"]
    assert end(life)[-1] == fx.Exit(0)
    assert life.stop() == []


def test_a_second_stop_does_not_wait_for_the_drain_and_a_third_kills():
    life = serving()
    life.stop()
    assert kinds(life.stop()) == ["StopAll", "Timer"]
    assert kinds(life.stop()) == ["KillAll"]


def test_without_a_shutdown_timeout_nothing_is_drained():
    assert kinds(serving(shutdown_timeout=0.0).stop()) == ["StopAll", "Timer"]


def test_stop_while_starting_stops_at_once():
    life = make()
    life.begin(0.0)
    assert kinds(life.stop()) == ["StopAll", "Timer"]
    assert end(life)[-1] == fx.Exit(0)


def test_an_old_deadline_does_nothing():
    life = serving()
    (old,) = only(life.stop(), fx.Timer)
    (new,) = only(life.drained("client.0"), fx.Timer)
    assert life.timer(old.key, 50.0) == []
    assert kinds(life.timer(new.key, 50.0)) == ["KillAll"]


# --- failures -------------------------------------------------------------------------------------


@pytest.mark.parametrize("opening", [False, True])
def test_a_death_before_it_serves_fails_the_topology(opening):
    life = make()
    life.begin(0.0)
    for actor in ACTORS if opening else ACTORS[:2]:
        life.ready(actor, 1.0)
    effects = life.died("worker.0", "boom", "the traceback", now=2.0)
    assert fx.TellFailed("worker.0", "boom", "the traceback", False) in effects
    assert life.state is (State.FAILING if opening else State.STOPPING)
    life.drained("client.0")
    assert end(life)[-1] == fx.Exit(1)


def test_a_users_mistake_exits_with_two():
    life = make()
    life.begin(0.0)
    effects = life.died("worker.0", "no such file", user_error=True, now=1.0)
    # No client is ready yet, so nobody is waited for.
    assert kinds(effects) == ["MarkDead", "TellFailed", "StopAll", "Timer"]
    assert end(life)[-1] == fx.Exit(2)


def test_without_restarts_a_death_is_told_to_the_clients_before_anything_ends():
    life = serving(max_restarts=0)
    effects = life.died("worker.0", "boom", "the traceback", now=100.0)
    assert kinds(effects) == ["MarkDead", "TellFailed", "Timer"]
    assert kinds(life.drained("client.0")) == ["StopAll", "Timer"]
    assert end(life)[-1] == fx.Exit(1)


def test_without_restarts_the_only_client_dying_leaves_nobody_to_wait_for():
    effects = serving(max_restarts=0).died("client.0", "boom", now=100.0)
    assert kinds(effects) == ["MarkDead", "TellFailed", "StopAll", "Timer"]


def test_who_is_not_ready_in_time_is_named_and_killed():
    life = make()
    (_, timer) = life.begin(0.0)
    for actor in ACTORS[1:]:
        life.ready(actor, 1.0)
    assert life.timer(timer.key, 60.0) == [fx.Kill(("worker.0",))]
    effects = life.died("worker.0", "signal SIGKILL", now=60.1)
    (told,) = only(effects, fx.TellFailed)
    assert told.error == "worker.0: not ready after 60 s (--startup-timeout)"


def test_the_startup_timeout_means_nothing_once_all_are_ready():
    assert serving().timer("startup", 60.0) == []


# --- one restart ----------------------------------------------------------------------------------


def test_a_death_is_told_to_all_who_are_ready_but_workers():
    life = serving()
    effects = life.died("tokenizer.0", "boom", "its traceback", now=100.0)
    assert kinds(effects) == ["MarkDead", "TellLost", "Timer", "Timer", "Timer"]
    assert effects[0] == fx.MarkDead(("tokenizer.0",))
    assert effects[1] == fx.TellLost(
        ("scheduler.0", "client.0", "detokenizer.0"),
        1,
        "tokenizer.0",
        "boom",
        "its traceback",
        ("tokenizer.0",),
    )


def test_a_unit_starts_again_when_all_have_forgotten_it_and_is_told_when_it_is_ready():
    life = serving()
    told = life.died("tokenizer.0", "boom", now=100.0)
    assert life.forgotten("scheduler.0", 1) == []
    assert life.forgotten("client.0", 1) == []
    assert life.forgotten("client.0", 1) == []  # once more
    effects = life.forgotten("detokenizer.0", 1)
    assert effects == [fx.Start(("tokenizer.0",)), fx.Timer(60.0, "startup tokenizer.0 1")]
    assert life.ready("tokenizer.0", 101.0) == [
        fx.TellBack(("scheduler.0", "client.0", "detokenizer.0"), ("tokenizer.0",))
    ]
    assert life.timer("startup tokenizer.0 1", 160.0) == []
    for timer in only(told, fx.Timer):
        assert life.timer(timer.key, 160.0) == []
    assert life.state is State.SERVING


@pytest.mark.parametrize(
    ("first", "second"), [("worker.0", "scheduler.0"), ("scheduler.0", "worker.0")]
)
def test_an_engine_is_restarted_as_one(first, second):
    life = serving()
    effects = life.died(first, "boom", now=100.0)
    assert only(effects, fx.MarkDead) == [fx.MarkDead(("worker.0", "scheduler.0"))]
    assert only(effects, fx.Kill) == [fx.Kill((second,))]
    assert only(effects, fx.TellLost) == []  # the other one may still say something
    effects = life.died(second, "killed", now=100.0)
    (told,) = only(effects, fx.TellLost)
    assert told.to == ("client.0", "tokenizer.0", "detokenizer.0")
    assert told.lost == ("worker.0", "scheduler.0")
    effects = answer(life, effects)
    assert only(effects, fx.Start) == [fx.Start(("worker.0", "scheduler.0"))]
    assert life.ready("scheduler.0", 101.0) == []
    assert only(life.ready("worker.0", 102.0), fx.TellBack) == [fx.TellBack(told.to, told.lost)]


def test_a_restarted_clients_door_is_opened_and_nothing_is_announced_twice():
    life = serving()
    assert only(lose(life, "client.0"), fx.Start)
    effects = life.ready("client.0", 101.0)
    assert kinds(effects) == ["TellBack", "OpenDoor"]
    assert effects[1] == fx.OpenDoor(("client.0",))
    assert life.listening("client.0") == []


def test_an_external_client_is_told_and_waited_for_without_a_deadline():
    units = {name: actors for name, actors in UNITS.items() if name != "client.0"}
    life = serving(units=units, external=["client.0"])
    effects = life.died("tokenizer.0", "boom", now=100.0)
    assert only(effects, fx.TellLost)[0].to == ("scheduler.0", "detokenizer.0", "client.0")
    assert len(only(effects, fx.Timer)) == 2
    assert answer(life, effects, skip=["client.0"]) == []
    assert kinds(life.forgotten("client.0", 1)) == ["Start", "Timer"]


# --- restarts in a row ----------------------------------------------------------------------------


def test_who_dies_again_at_once_is_started_later_and_later_and_at_last_never_again():
    life = serving(max_restarts=6)
    waits = []
    now = 10.0
    for _ in range(6):
        effects = lose(life, "tokenizer.0", now)
        for timer in only(effects, fx.Timer):
            if timer.key.startswith("back-off"):
                assert not only(effects, fx.Start)
                waits.append(timer.seconds)
                effects = life.timer(timer.key, now)
        assert only(effects, fx.Start)
        life.ready("tokenizer.0", now)
        now += 0.5
    assert waits == [0.5, 1.0, 2.0, 4.0, 8.0]
    effects = life.died("tokenizer.0", "boom", now=now)
    (told,) = only(effects, fx.TellFailed)
    assert told.error == "boom; tokenizer.0 has died 7 times in a row (--max-restarts 6)"
    assert life.state is State.FAILING


def test_who_has_lived_for_a_second_begins_again_at_the_first_restart():
    life = serving(max_restarts=1)
    for now in range(10, 100, 10):
        assert only(lose(life, "tokenizer.0", now), fx.Start)
        life.ready("tokenizer.0", now + 1)


def test_dying_before_being_ready_counts_and_is_told_again():
    life = serving()
    assert only(lose(life, "worker.0", 10.0), fx.Start)
    effects = life.died("scheduler.0", "again", now=11.0)
    assert fx.Kill(("worker.0",)) in effects
    (timer,) = [t for t in only(effects, fx.Timer) if t.key.startswith("back-off")]
    assert timer.seconds == 0.5
    assert life.timer(timer.key, 12.0) == []
    effects = life.died("worker.0", "killed", now=12.0)
    assert only(effects, fx.TellLost)[0].death == 2
    assert only(answer(life, effects), fx.Start)


def test_a_mistake_of_the_user_at_a_restart_ends_everything():
    life = serving()
    lose(life, "worker.0")
    effects = life.died("worker.0", "no such file", user_error=True, now=101.0)
    assert only(effects, fx.TellFailed)[0].user_error
    life.drained("client.0")
    assert end(life)[-1] == fx.Exit(2)


def test_a_restart_that_takes_too_long_is_killed_and_tried_again():
    life = serving()
    (timer,) = [t for t in only(lose(life, "worker.0"), fx.Timer) if t.key.startswith("startup")]
    life.ready("scheduler.0", 101.0)
    assert life.timer(timer.key, 160.0) == [fx.Kill(("worker.0",))]
    effects = life.died("worker.0", "signal SIGKILL", now=160.0)
    assert fx.Kill(("scheduler.0",)) in effects
    effects = life.died("scheduler.0", "killed", now=160.0)
    assert "not ready after 60 s" in only(effects, fx.TellLost)[0].error


# --- several at once ------------------------------------------------------------------------------


def test_an_addressee_that_dies_is_waited_for_no_longer():
    life = serving()
    first = life.died("tokenizer.0", "boom", now=100.0)
    assert answer(life, first, skip=["detokenizer.0"]) == []
    second = life.died("detokenizer.0", "boom too", now=100.1)
    assert only(second, fx.Start) == [fx.Start(("tokenizer.0",))]  # it waited only for that one
    (told,) = only(second, fx.TellLost)
    assert told.to == ("scheduler.0", "client.0")
    assert only(answer(life, second), fx.Start) == [fx.Start(("detokenizer.0",))]


def test_nobody_is_started_while_others_are_dying():
    life = serving()
    first = life.died("tokenizer.0", "boom", now=100.0)
    second = life.died("scheduler.0", "boom", now=100.0)
    assert fx.Kill(("worker.0",)) in second
    assert answer(life, first) == []
    effects = life.died("worker.0", "killed", now=100.0)
    assert only(effects, fx.Start) == [fx.Start(("tokenizer.0",))]
    assert only(answer(life, effects), fx.Start) == [fx.Start(("worker.0", "scheduler.0"))]


def test_who_becomes_ready_is_brought_up_to_date_before_anyone_hears_of_it():
    life = serving()
    lose(life, "tokenizer.0")
    lose(life, "worker.0")
    effects = life.ready("tokenizer.0", 101.0)
    (told,) = only(effects, fx.TellLost)
    assert (told.to, told.lost) == (("tokenizer.0",), ("worker.0", "scheduler.0"))
    assert not only(effects, fx.TellBack)
    assert life.forgotten("tokenizer.0", told.death) == [
        fx.TellBack(("client.0", "detokenizer.0"), ("tokenizer.0",))
    ]
    effects = regain(life, ["worker.0", "scheduler.0"], 102.0)
    assert only(effects, fx.TellLost) == []  # the tokenizer is up
    assert only(effects, fx.TellBack)[0].to == ("client.0", "tokenizer.0", "detokenizer.0")


def test_who_was_starting_is_told_even_of_those_that_are_back():
    life = serving()
    lose(life, "scheduler.0")  # takes long to come back
    lose(life, "client.0")
    life.ready("client.0", 101.0)
    answers = life.forgotten("client.0", 1)
    assert fx.OpenDoor(("client.0",)) in answers
    effects = life.ready("scheduler.0", 102.0)
    (told,) = only(effects, fx.TellLost)
    assert told.lost == ("client.0",)
    assert effects[-1] == fx.TellBack(("scheduler.0",), ("client.0",))
    assert life.ready("worker.0", 103.0) == []
    assert only(life.forgotten("scheduler.0", told.death), fx.TellBack)


def test_a_late_answer_to_an_older_death_counts_for_nothing():
    life = serving()
    lose(life, "tokenizer.0", 100.0)
    life.ready("tokenizer.0", 101.0)
    effects = life.died("tokenizer.0", "boom", now=103.0)
    (told,) = only(effects, fx.TellLost)
    assert told.death == 2
    for actor in told.to:
        assert life.forgotten(actor, 1) == []
    assert life.forgotten("nobody", 2) == []
    assert only(answer(life, effects), fx.Start)


def test_who_does_not_answer_is_killed_which_is_its_own_death():
    life = serving()
    effects = life.died("tokenizer.0", "boom", now=100.0)
    answer(life, effects, skip=["scheduler.0"])
    (key,) = [t.key for t in only(effects, fx.Timer) if t.key.startswith("silent scheduler.0")]
    assert life.timer(key, 105.0) == [fx.Kill(("scheduler.0",))]
    effects = life.died("scheduler.0", "signal SIGKILL", now=105.0)
    assert fx.Kill(("worker.0",)) in effects
    effects = life.died("worker.0", "killed", now=105.0)
    assert "silent for 5 s" in only(effects, fx.TellLost)[0].error


def test_a_new_incarnation_has_its_own_time_to_answer():
    life = serving()
    first = life.died("tokenizer.0", "boom", now=100.0)
    answer(life, first, skip=["client.0", "detokenizer.0"])
    (old,) = [t.key for t in only(first, fx.Timer) if t.key.startswith("silent detokenizer.0")]
    lost = life.died("detokenizer.0", "boom", now=101.0)
    for actor in ("client.0", "scheduler.0"):
        life.forgotten(actor, 2)
    assert only(lost, fx.Start) == []
    effects = life.ready("detokenizer.0", 104.0)  # told of the tokenizer's death again
    assert only(effects, fx.TellLost)[0].death == 1
    assert life.timer(old, 105.0) == []


# --- ending amid restarts -------------------------------------------------------------------------


def test_restarts_go_on_while_draining():
    life = serving()
    life.stop()
    assert only(lose(life, "worker.0"), fx.Start)
    assert only(regain(life, ["worker.0", "scheduler.0"]), fx.TellBack)
    assert kinds(life.drained("client.0")) == ["StopAll", "Timer"]
    assert end(life)[-1] == fx.Exit(0)


def test_a_client_that_dies_while_draining_has_drained():
    life = serving()
    life.stop()
    effects = lose(life, "client.0")
    assert "StopAll" in kinds(effects)
    assert not only(effects, fx.Start)
    assert end(life)[-1] == fx.Exit(0)


def test_a_client_that_dies_while_others_drain_stays_down():
    units = {**UNITS, "client.1": ("client.1",)}
    life = serving(units=units, clients=("client.0", "client.1"))
    life.stop()
    effects = lose(life, "client.1")
    assert only(effects, fx.TellLost)
    assert not only(effects, fx.Start)
    assert kinds(life.drained("client.0")) == ["StopAll", "Timer"]


def test_a_stop_while_the_only_client_is_down_has_nobody_to_wait_for():
    life = serving()
    lose(life, "client.0")
    assert kinds(life.stop()) == ["StopAll", "Timer"]


def test_a_client_that_was_restarting_at_the_stop_opens_no_door():
    units = {**UNITS, "client.1": ("client.1",)}
    life = serving(units=units, clients=("client.0", "client.1"))
    lose(life, "client.1")
    assert kinds(life.stop()) == ["Drain", "Timer"]
    assert not only(life.ready("client.1", 101.0), fx.OpenDoor)
    assert kinds(life.drained("client.0")) == ["StopAll", "Timer"]


def test_a_stop_in_the_middle_of_a_restart_starts_nothing_more():
    life = serving(shutdown_timeout=0.0)
    effects = life.died("scheduler.0", "boom", now=100.0)
    life.stop()
    assert answer(life, effects) == []
    assert kinds(life.died("worker.0", "killed", now=100.0)) == ["MarkDead"]
    for actor in ("client.0", "tokenizer.0"):
        life.died(actor, "gone", now=101.0)
    assert life.died("detokenizer.0", "gone", now=101.0)[-1] == fx.Exit(0)


def test_a_stop_during_the_back_off_ends_it():
    life = serving(shutdown_timeout=0.0)
    lose(life, "tokenizer.0", 100.0)
    life.ready("tokenizer.0", 101.0)
    effects = lose(life, "tokenizer.0", 101.5)
    (timer,) = [t for t in only(effects, fx.Timer) if t.key.startswith("back-off")]
    life.stop()
    assert life.timer(timer.key, 102.0) == []


# --- any order ------------------------------------------------------------------------------------


class World:
    """Carries effects out at random times, and holds the rules that every order must keep."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        units = {**UNITS, "client.1": ("client.1",)}
        self.life = make(units, ("client.0", "client.1"), max_restarts=rng.choice([0, 2, 50]))
        self.running, self.is_ready, self.doomed, self.marked = set(), set(), set(), set()
        self.unanswered, self.down_for = [], {}
        self.timers, self.exits, self.now = [], 0, 0.0
        self.apply(self.life.begin(0.0))

    def apply(self, effects):
        assert not (effects and self.exits)
        for effect in effects:
            match effect:
                case fx.Start(actors=actors):
                    assert not self.running.intersection(actors)
                    waited_for = [a for a, _, lost in self.unanswered if set(lost) & set(actors)]
                    assert self.doomed.issuperset(waited_for)
                    self.running |= set(actors)
                    self.marked -= set(actors)
                    for actor in actors:
                        self.down_for[actor] = set()
                case fx.Kill(actors=actors):
                    self.doomed |= self.running.intersection(actors)
                case fx.KillAll():
                    self.doomed |= self.running
                case fx.StopAll():
                    self.doomed |= self.running
                case fx.MarkDead(actors=actors):
                    self.marked |= set(actors)
                case fx.TellLost(to=to, death=death, lost=lost):
                    for actor in to:
                        assert actor in self.is_ready
                        self.down_for[actor] |= set(lost)
                        self.unanswered.append((actor, death, lost))
                case fx.TellBack(to=to, names=names):
                    for actor in to:
                        assert actor in self.is_ready
                        assert self.down_for[actor] >= set(names)
                        self.down_for[actor] -= set(names)
                case fx.Timer(key=key):
                    assert key not in self.timers
                    self.timers.append(key)
                case fx.Exit():
                    assert not self.running
                    self.exits += 1

    def die(self, actor):
        self.running.discard(actor)
        self.is_ready.discard(actor)
        self.doomed.discard(actor)
        self.unanswered = [entry for entry in self.unanswered if entry[0] != actor]
        self.apply(self.life.died(actor, "gone", now=self.now))
        assert actor in self.marked or actor in self.running

    def step(self, deaths=0.1):
        rng, life = self.rng, self.life
        self.now += rng.random()
        if self.doomed and rng.random() < 0.7:
            self.die(rng.choice(sorted(self.doomed)))
        elif self.running and rng.random() < deaths:
            self.die(rng.choice(sorted(self.running)))
        elif self.unanswered and rng.random() < 0.7:
            actor = rng.choice(self.unanswered)[0]
            entry = next(entry for entry in self.unanswered if entry[0] == actor)
            self.unanswered.remove(entry)
            self.apply(life.forgotten(actor, entry[1]))
        elif starting := sorted(self.running - self.is_ready - self.doomed):
            actor = rng.choice(starting)
            self.is_ready.add(actor)
            self.apply(life.ready(actor, self.now))
        elif self.timers and rng.random() < 0.5:
            self.apply(life.timer(self.timers.pop(rng.randrange(len(self.timers))), self.now))
        elif life.state is State.OPENING:
            self.apply(life.listening(f"client.{rng.randrange(2)}"))


@pytest.mark.parametrize("seed", range(300))
def test_any_order_of_events_settles_and_ends_in_exactly_one_exit(seed):
    world = World(seed)
    life = world.life
    for _ in range(300):
        world.step()
    for _ in range(400):
        world.step(deaths=0.0)
    if life.state is State.SERVING:  # everyone is back, and knows it
        assert world.running == world.is_ready == set(life._unit_of)
        assert not any(world.down_for.values())
        assert not world.marked
    for _ in range(3):
        world.apply(life.stop())
    while world.running:
        world.die(sorted(world.running)[0])
    assert world.exits == 1
