"""The supervisor's decisions, without its processes: a table of states and events.

    state      | event                         | then      | and does
    -----------|-------------------------------|-----------|----------------------------------------
    STARTING   | all actors are ready          | OPENING   | OpenDoor: clients get TopologyReady
    OPENING    | all clients listen            | SERVING   | Announce
    up to here | an actor died                 | FAILING   | TellFailed to clients; a short deadline
    up to here | a remote one lost its host    | as it was | its unit is restarted, see below
    STARTING   | remote units can't be started | STOPPING  | TellFailed to clients; StopAll
    SERVING,   | an actor died                 | as it was | its unit is restarted, see below
    DRAINING   | once too often, or ConfigError| FAILING   | TellFailed to clients; a short deadline
    SERVING    | stop is asked for             | DRAINING  | Drain: clients refuse work; a deadline
    any before | stop is asked for             | STOPPING  | StopAll; a deadline
    DRAINING   | all clients have drained      | STOPPING  | StopAll; a deadline
    DRAINING   | stop again, or deadline       | STOPPING  | StopAll; a deadline
    FAILING    | clients drained/deadline/stop | STOPPING  | StopAll; a deadline
    STOPPING   | all actors are gone           | STOPPED   | Exit
    STOPPING   | stop again, or deadline       | STOPPING  | KillAll

A death while STOPPING is what was asked for. The exit code is 0 when stopped on request, 1 after a
failure, 2 when that was the user's mistake (ConfigError).

A restart concerns a unit (topology.units) and nobody else. Its phases are in restarts.py:

    phase    | event                      | then     | and does
    ---------|----------------------------|----------|--------------------------------------------
    UP,      | one of its actors died     | DOWN     | MarkDead (the unit), Kill (the rest of it)
    STARTING |                            |          |
    DOWN     | the last of them is reaped | DOWN     | TellLost to all who are ready
    DOWN     | what it waits for has come | STARTING | Start (the unit); --startup-timeout
    STARTING | all ready, and up to date  | UP       | TellBack to all who are ready; OpenDoor if a
             |                            |          | client

1. A death is told when nobody of the unit lives any more: who is being killed may still say things
   for a moment, and whoever forgets it has to have heard the last of them.
2. Nobody hears of a new incarnation, and no channel into it is used again, before everyone who was
   ready at the death has forgotten the old one. So what an old incarnation has caused can't meet
   what a new one is asked for.
3. Who becomes ready is brought up to date first: it is told of each unit that is not UP, and of
   each that died since it was started itself (and that this one is back). Its own unit is not UP,
   and so isn't asked for anything, before it has answered.
4. Workers and mirrors talk to nobody outside their unit on this host, and are told nothing.
5. Who doesn't answer within --step-timeout hangs and is killed, which is a death of its own. An
   external client can't be killed, and is waited for.
6. A client that dies while DRAINING stays down: it would have nothing to do.
7. A replica, tokenizer or detokenizer that dies once too often, or by a ConfigError, is given up
   while there is another one: it stays down, and the rest goes on.
8. A remote actor waits for another host (awaited.py). At the first start that may take
   --startup-timeout, and any time on a node; once the others serve, it may take any time, and
   however often the other host is lost, nothing is given up for it. What of its unit is here, if
   there is something, has --startup-timeout from when all hosts are there.

How units are added and removed while it is SERVING is elastic.py's.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Sequence

from .awaited import Awaited
from .effects import (
    Announce,
    Drain,
    Effect,
    Exit,
    Kill,
    KillAll,
    MarkDead,
    OpenDoor,
    Start,
    StopAll,
    TellBack,
    TellFailed,
    TellLost,
    Timer,
)
from .restarts import Death, Phase, Unit
from .topology import ENGINE

_SPARED = (ENGINE, "tokenizer", "detokenizer")  # while there is another one
FAIL_SECONDS = 2.0
STOP_SECONDS = 5.0


class State(enum.Enum):
    STARTING = "starting"
    OPENING = "opening"
    SERVING = "serving"
    DRAINING = "draining"
    FAILING = "failing"
    STOPPING = "stopping"
    STOPPED = "stopped"


class Lifecycle:
    """units: what is restarted together, by name, in starting order. clients: the names of all
    clients. external: those of them that are no children (the process of an `LLM`): the death of
    one is a stop. remote: actors that wait for another host. patient: whether they may do so for
    any time at the first start, too.

    Times are in seconds. Every event returns what is to be done, in order.
    """

    def __init__(
        self,
        units: dict[str, tuple[str, ...]],
        clients: Iterable[str],
        *,
        external: Iterable[str] = (),
        remote: Iterable[str] = (),
        patient: bool = False,
        shutdown_timeout: float,
        max_restarts: int,
        startup_timeout: float,
        step_timeout: float,
    ) -> None:
        self.state = State.STARTING
        self.exit_code = 0
        self._units = [Unit(name, actors) for name, actors in units.items()]
        self._unit_of = {actor: unit for unit in self._units for actor in unit.actors}
        self._clients = tuple(clients)
        self._external = tuple(external)
        self._awaited = Awaited(remote, patient)
        self._too_late = False  # the first start has taken too long
        self._not_listening = set(self._clients)
        self._not_drained: set[str] = set()
        self._unanswered: dict[str, dict[int, str]] = {}  # actor: {death: the timer for it}
        self._missed: dict[str, set[str]] = {}  # units that died while an actor was starting
        self._reasons: dict[str, str] = {}  # why the lifecycle had an actor killed
        self._shutdown_timeout = shutdown_timeout
        self._max_restarts = max_restarts
        self._startup_timeout = startup_timeout
        self._step_timeout = step_timeout
        self._num_deaths = 0
        self._num_timers = 0
        self._deadline_key = ""

    # Events

    def begin(self, now: float) -> Sequence[Effect]:
        """Start everything."""
        for unit in self._units:
            unit.started()
        self._missed = {actor: set() for actor in self._unit_of}
        timers = [] if self._awaited.patient else [Timer(self._startup_timeout, "startup")]
        return [Start(tuple(self._unit_of)), *timers]

    def ready(self, actor: str, now: float) -> Sequence[Effect]:
        unit = self._unit_of.get(actor)
        if unit is None or unit.phase is not Phase.STARTING:
            return []
        unit.became_ready(actor, now)
        if not self._restarts:
            return []
        timers = self._from_here(unit, actor)
        return [*timers, *self._bring_up_to_date(actor), *self._settle(), *self._if_all_ready()]

    def listening(self, client: str) -> Sequence[Effect]:
        self._not_listening.discard(client)
        return self._if_listening()

    def drained(self, client: str) -> Sequence[Effect]:
        self._not_drained.discard(client)
        if self.state in (State.DRAINING, State.FAILING) and not self._not_drained:
            return self._stop_all()
        return []

    def forgotten(self, actor: str, death: int) -> Sequence[Effect]:
        """An actor has answered PeersLost(death)."""
        self._unanswered.get(actor, {}).pop(death, None)
        return [*self._settle(), *self._if_all_ready()]

    def stop(self) -> Sequence[Effect]:
        """Somebody asked for the end: a signal, or the death of an external client."""
        if self.state is State.STOPPED:
            return []
        if self.state is State.STOPPING:
            return [KillAll()]
        if self.state is not State.SERVING or self._shutdown_timeout <= 0:
            return self._stop_all()
        self.state = State.DRAINING
        self._not_drained = {client for client in self._clients if self._is_up(client)}
        if not self._not_drained:
            return self._stop_all()
        # The clients abort what is left at their deadline; ours comes after it.
        deadline = self._deadline(self._shutdown_timeout + FAIL_SECONDS)
        return [Drain(self._shutdown_timeout), deadline]

    def died(
        self,
        actor: str,
        error: str,
        traceback: str = "",
        user_error: bool = False,
        *,
        from_outside: bool = False,
        exit_code: int = 0,
        now: float,
    ) -> Sequence[Effect]:
        """A process is gone and reaped, for a reason if it gave one. exit_code: if not 0, that all
        else has to end, too, with this."""
        unit = self._unit_of[actor]
        unit.running.discard(actor)
        self._unanswered.pop(actor, None)
        self._missed.pop(actor, None)
        error = self._reasons.pop(actor, error)
        if not self._restarts:
            ended = self.drained(actor) if self.state is State.FAILING else self._if_gone()
            return [MarkDead((actor,)), *ended]
        if unit.phase is Phase.DOWN:
            return self._settle()
        self._num_deaths += 1
        death = Death(self._num_deaths, actor, error, traceback, from_outside)
        unit.went_down(death, now, ours=not self._awaited.are_lost_by(death))
        if exit_code:
            return self._fail(unit, user_error, exit_code)
        if self._is_final(unit, user_error):
            if not self._can_do_without(unit):
                return self._fail(unit, user_error)
            unit.given_up = True
        return self._lose(unit)

    def timer(self, key: str, now: float) -> Sequence[Effect]:
        what, name, number = [*key.split(), "", ""][:3]
        if what == "deadline":
            return self._deadline_passed(key)
        if self.state in (State.FAILING, State.STOPPING, State.STOPPED):
            return []
        match what:
            case "startup" if not name:
                return self._first_is_too_slow() if self.state is State.STARTING else []
            case "startup" if self._unit(name).death.number == int(number):
                return self._too_slow([self._unit(name)])
            case "back-off" if self._unit(name).death.number == int(number):
                self._unit(name).backing_off = False
                return self._settle()
            case "silent" if key in self._unanswered.get(name, {}).values():
                return self._kill([name], f"silent for {self._step_timeout:g} s (--step-timeout)")
        return []

    def cannot_launch(self, error: str, user_error: bool) -> Sequence[Effect]:
        """Nobody can start the other hosts, ever. Once all serve that is no end."""
        if self.state is not State.STARTING:
            return []
        self.exit_code = 2 if user_error else 1
        return [TellFailed("launcher", error, "", user_error), *self._stop_all()]

    # Starting and ending

    def _if_all_ready(self) -> Sequence[Effect]:
        if self.state is not State.STARTING or any(self._unanswered.values()):
            return []
        if not all(unit.all_ready for unit in self._units):
            return []
        for unit in self._units:
            unit.phase = Phase.UP
        self.state = State.OPENING
        return [OpenDoor(self._clients), *self._if_listening()]

    def _if_listening(self) -> Sequence[Effect]:
        if self.state is State.OPENING and not self._not_listening:
            self.state = State.SERVING
            return [Announce()]
        return []

    def _is_final(self, unit: Unit, user_error: bool) -> bool:
        too_often = unit.our_deaths_in_a_row > self._max_restarts
        if self.state in (State.STARTING, State.OPENING):
            waits = self._awaited.has(unit.death.actor) and not too_often
            return user_error or self._too_late or not waits
        return (user_error or too_often) and not self._awaited.are_lost_by(unit.death)

    def _fail(self, unit: Unit, user_error: bool, exit_code: int = 0) -> Sequence[Effect]:
        self.exit_code = exit_code or (2 if user_error else 1)
        self.state = State.FAILING
        self._not_drained = set(self._clients).intersection(self._listeners())
        death, error = unit.death, self._reason(unit)
        effects: list[Effect] = [
            MarkDead((death.actor,)),
            TellFailed(death.actor, error, death.traceback, user_error),
        ]
        rest = unit.running.difference(self._clients)
        if exit_code and rest:  # what may wait for the dead has nobody else to end it soon
            effects.append(Kill(tuple(actor for actor in unit.actors if actor in rest)))
        if not self._not_drained:
            return [*effects, *self._stop_all()]
        return [*effects, self._deadline(FAIL_SECONDS)]

    def _reason(self, unit: Unit) -> str:
        error = unit.death.error
        if 0 < self._max_restarts < unit.our_deaths_in_a_row:
            times = f"{unit.our_deaths_in_a_row} times in a row"
            error += f"; {unit.name} has died {times} (--max-restarts {self._max_restarts})"
        return error

    def _deadline_passed(self, key: str) -> Sequence[Effect]:
        if key != self._deadline_key or self.state is State.STOPPED:
            return []
        return [KillAll()] if self.state is State.STOPPING else self._stop_all()

    def _stop_all(self) -> Sequence[Effect]:
        self.state = State.STOPPING
        return [StopAll(), self._deadline(STOP_SECONDS), *self._if_gone()]

    def _if_gone(self) -> Sequence[Effect]:
        if self.state is not State.STOPPING or any(unit.running for unit in self._units):
            return []
        self.state = State.STOPPED
        return [Exit(self.exit_code)]

    # Restarting

    @property
    def _restarts(self) -> bool:
        return self.state not in (State.FAILING, State.STOPPING, State.STOPPED)

    def _can_do_without(self, unit: Unit) -> bool:
        """Whether this is one of several that do the same, and not the last one."""
        alike = [other for other in self._units if other is not unit and other.kind == unit.kind]
        others = [other for other in alike if self._counts_on(other)]
        serves = self.state in (State.SERVING, State.DRAINING)
        return serves and self._max_restarts > 0 and unit.kind in _SPARED and bool(others)

    def _counts_on(self, unit: Unit) -> bool:
        """Whether this replica serves, or will again."""
        return not unit.given_up and (unit.phase is Phase.UP or not self._awaited.any_in(unit))

    def _lose(self, unit: Unit) -> Sequence[Effect]:
        """A unit has gone DOWN: nobody counts on it from here on."""
        effects: list[Effect] = [MarkDead(unit.actors)]
        if unit.running:
            effects.append(Kill(tuple(actor for actor in unit.actors if actor in unit.running)))
        for actor in unit.actors:
            self._unanswered.pop(actor, None)
            self._missed.pop(actor, None)
        for missed in self._missed.values():
            missed.add(unit.name)
        unit.told = False
        if seconds := unit.back_off_seconds():
            unit.backing_off = True
            effects.append(Timer(seconds, f"back-off {unit.name} {unit.death.number}"))
        if self.state is State.DRAINING and self._not_drained.intersection(unit.actors):
            for actor in unit.actors:
                effects += self.drained(actor)
        return [*effects, *self._settle()]

    def _tell_lost(self, unit: Unit, to: tuple[str, ...]) -> Iterator[Effect]:
        death = unit.death
        yield TellLost(
            to,
            death.number,
            death.actor,
            self._reason(unit),
            death.traceback,
            unit.actors,
            death.from_outside,
            unit.given_up,
        )
        yield from self._await_answers(to, death.number)

    def _await_answers(self, to: tuple[str, ...], number: int) -> Iterator[Effect]:
        for actor in to:
            timer = self._timer(self._step_timeout, f"silent {actor}")
            self._unanswered.setdefault(actor, {})[number] = timer.key
            if actor not in self._external:
                yield timer

    def _bring_up_to_date(self, actor: str) -> Iterator[Effect]:
        missed = self._missed.pop(actor, set())
        if not _is_told(actor):
            return
        for unit in self._units:
            if unit is self._unit_of[actor] or not unit.told or self._is_new(unit):
                continue
            if unit.phase is not Phase.UP or unit.name in missed:
                yield from self._tell_lost(unit, (actor,))
                if unit.phase is Phase.UP:
                    yield TellBack((actor,), unit.actors)

    def _settle(self) -> Sequence[Effect]:
        """Take every step that waits for nothing any more."""
        effects: list[Effect] = []
        for unit in self._units:
            if self._restarts and not unit.told and not unit.running:
                unit.told = True
                effects += self._tell_lost(unit, tuple(self._listeners()))
        for unit in self._units:
            if self._restarts and self._may_go_up(unit):
                unit.phase = Phase.UP
                effects += self._tell_back(unit)
        for unit in self._units:
            if self._restarts and self._may_start(unit):
                unit.started()
                self._missed |= {actor: set() for actor in unit.actors}
                effects.append(Start(unit.actors))
                if not self._awaited.any_in(unit):
                    effects.append(self._startup_timer(unit))
        return effects

    def _from_here(self, unit: Unit, actor: str) -> Iterator[Effect]:
        """Who becomes ready may be the one that the rest of its unit has waited for."""
        if unit.all_ready or not self._awaited.ends_with(unit, actor):
            return
        if not self._is_new(unit):
            yield self._startup_timer(unit)
        elif self._awaited.patient:
            yield Timer(self._startup_timeout, "startup")

    def _startup_timer(self, unit: Unit) -> Timer:
        return Timer(self._startup_timeout, f"startup {unit.name} {unit.death.number}")

    def _is_new(self, unit: Unit) -> bool:
        """Whether this is the first start, and it has not died in it."""
        return self.state is State.STARTING and not unit.death.number

    def _tell_back(self, unit: Unit) -> Iterator[Effect]:
        others = tuple(actor for actor in self._listeners() if actor not in unit.actors)
        yield TellBack(others, unit.actors)
        clients = tuple(actor for actor in unit.actors if actor in self._clients)
        if clients and self.state is State.SERVING:
            yield OpenDoor(clients)

    def _may_go_up(self, unit: Unit) -> bool:
        return (
            unit.phase is Phase.STARTING
            and not self._is_new(unit)
            and unit.all_ready
            and not any(self._unanswered.get(actor) for actor in unit.actors)
        )

    def _may_start(self, unit: Unit) -> bool:
        return (
            unit.phase is Phase.DOWN
            and not any(other.running for other in self._units if other.phase is Phase.DOWN)
            and not any(unit.death.number in deaths for deaths in self._unanswered.values())
            and not unit.backing_off
            and not unit.given_up
            and not (self.state is State.DRAINING and set(self._clients) & set(unit.actors))
        )

    def _first_is_too_slow(self) -> Sequence[Effect]:
        self._too_late = True
        down = [unit for unit in self._units if unit.phase is Phase.DOWN]
        return self._fail(down[0], False) if down else self._too_slow(self._units)

    def _too_slow(self, units: Iterable[Unit]) -> Sequence[Effect]:
        late = [
            actor
            for unit in units
            for actor in unit.actors
            if unit.phase is Phase.STARTING and actor not in unit.ready
        ]
        reason = f"not ready after {self._startup_timeout:g} s (--startup-timeout)"
        reason += self._awaited.who_never_came(late, self._unit_of)
        return self._kill(late, reason)

    def _kill(self, actors: list[str], reason: str) -> Sequence[Effect]:
        if not actors:
            return []
        self._reasons |= dict.fromkeys(actors, f"{', '.join(actors)}: {reason}")
        return [Kill(tuple(actors))]

    # Who is there

    @property
    def given_up(self) -> set[str]:
        """The actors that stay down while the rest goes on."""
        return {actor for unit in self._units if unit.given_up for actor in unit.actors}

    def _unit(self, name: str) -> Unit:
        return next(unit for unit in self._units if unit.name == name)

    def _is_up(self, client: str) -> bool:
        return client in self._external or self._unit_of[client].phase is Phase.UP

    def _listeners(self) -> Iterator[str]:
        """All who are told what happens: who is ready and no worker, and external clients."""
        for unit in self._units:
            yield from (actor for actor in unit.actors if actor in unit.ready and _is_told(actor))
        yield from self._external

    # Timers

    def _deadline(self, seconds: float) -> Timer:
        """The one that counts; the one before doesn't any more."""
        timer = self._timer(seconds, "deadline")
        self._deadline_key = timer.key
        return timer

    def _timer(self, seconds: float, what: str) -> Timer:
        self._num_timers += 1
        return Timer(seconds, f"{what} {self._num_timers}")


def _is_told(actor: str) -> bool:
    return not actor.startswith(("worker.", "mirror."))
