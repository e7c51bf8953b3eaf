"""Replicas that come and go while the topology serves: the lifecycle, and its scales.

A *scale* asks for another number of replicas. There is one at a time.

    phase     | event                              | then      | and does
    ----------|------------------------------------|-----------|------------------------------------
    WAITING   | more are wanted, and no unit is    | WAITING   | Connect
              | STARTING                           |           |
    WAITING   | that is done                       | ADDING    | TellAdded to all who are ready
    WAITING   | it can't be done                   | -         | ScaleEnded, with the error
    ADDING    | all who were told have answered    | ADDING    | Start, as of a unit that is DOWN
    ADDING    | a new unit is up to date           | ADDING    | TellBack: clients use it from here
    ADDING    | all new units have been UP         | -         | ScaleEnded
    ADDING    | a new one died, before it was UP   | LEAVING   | all new ones leave again
    WAITING   | fewer are wanted                   | LEAVING   | TellLeaving to clients; a deadline
    LEAVING   | clients have left, or the deadline | ENDING    | MarkDead, Stop; kill after a while
    ENDING    | all of a unit are reaped           | ENDING    | TellLost(removed) to all who are
              |                                    |           | ready
    ENDING    | all told have answered, and no     | -         | Disconnect, ScaleEnded
              | other unit is STARTING             |           |
    any       | stop, or the topology fails        | -         | ScaleEnded, with that as its error

1. A new unit is to the others a replica that is down: restarts.py's phases and lifecycle.py's rules
   hold for it, and nobody uses a channel with it before its PeersBack. Who is started after Connect
   has the channels from birth, and is told of it as of any unit that is not UP.
2. A scale that adds is whole or not at all. What a new unit dies of is its error, and whatever it
   is, the others go on.
3. A unit that leaves goes on working, and isn't replaced when it dies: its death is told like any
   other, then its removal. One that has been UP and dies while others are being added is restarted.
4. A client that dies while it leaves has left. Its next incarnation is told to leave, too.
5. Replicas that leave or are new are none that one can count on (7. in lifecycle.py).
6. Nobody has an end of a removed channel after Disconnect: whoever was started with one was told
   before. So a name can be used again.
7. Any other death takes its course beside the scale, which waits for it where the table says so.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from .effects import (
    Connect,
    Disconnect,
    Effect,
    Kill,
    MarkDead,
    ScaleEnded,
    Stop,
    TellAdded,
    TellLeaving,
    TellLost,
    Timer,
)
from .lifecycle import STOP_SECONDS, Lifecycle, State
from .restarts import Death, Phase, Unit
from .topology import ENGINE


class _Scale(msgspec.Struct):
    """new: units to be added, and not connected yet. connects: Connect has been said. error: why it
    is being taken back."""

    replicas: int
    new: dict[str, tuple[str, ...]]
    drain_seconds: float
    connects: bool = False
    error: str = ""


class ElasticLifecycle(Lifecycle):
    """Lifecycle, with `scale` and `left` as further events."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._scale: _Scale | None = None
        self._fresh: set[str] = set()  # units of this scale that have not been UP
        self._added: list[str] = []  # all units of this scale
        self._leaving: list[str] = []  # units that are LEAVING or ENDING
        self._removed: set[str] = set()  # those of them that are ENDING
        self._not_left: set[str] = set()  # clients
        self._num_changes = 0
        self._leave_key = ""

    @property
    def scaling_to(self) -> int:
        """The number of replicas that is wanted, while there is a scale; else 0."""
        return self._scale.replicas if self._scale is not None else 0

    @property
    def num_replicas(self) -> int:
        """Those that requests go to, or will when they are back."""
        unsure = {*self._fresh, *self._leaving}
        return sum(unit.name not in unsure and not unit.given_up for unit in self._replicas())

    def refusal(self, replicas: int) -> tuple[str, int] | None:
        """Why there can't be a scale to so many replicas now, and the HTTP status of that."""
        if self._scale is not None:
            return f"a scale to --replicas {self._scale.replicas} is under way", 409
        if self.state is not State.SERVING:
            return f"the server is {self.state.value}", 503
        units = self._replicas()
        if replicas < len(units) and all(unit.given_up for unit in units[:replicas]):
            return f"none would be left: {units[0].name} is down for good", 409
        return None

    # Events

    def scale(
        self, replicas: int, new: dict[str, tuple[str, ...]], drain_seconds: float
    ) -> Sequence[Effect]:
        """Let there be so many replicas; new: the units to be added. `refusal` has none."""
        self._scale = _Scale(replicas, new, drain_seconds)
        self._added = list(new)
        leaving = [unit.name for unit in self._replicas()[replicas:]]
        return [*self._leave(leaving), *self._settle()]

    def connected(self) -> Sequence[Effect]:
        """Connect is done."""
        return [*self._add(), *self._settle()]

    def cannot_connect(self, error: str) -> Sequence[Effect]:
        """Connect can't be done, and what was done of it is undone."""
        return list(self._give_up_scale(error))

    def left(self, client: str) -> Sequence[Effect]:
        """A client has no request with those that leave."""
        self._not_left.discard(client)
        return self._settle()

    def stop(self) -> Sequence[Effect]:
        return [*self._give_up_scale("the server is shutting down"), *super().stop()]

    def died(self, actor: str, *args: Any, **more: Any) -> Sequence[Effect]:
        unit = self._unit_of[actor]
        if unit.name in self._fresh or unit.name in self._leaving:
            unit.given_up = True
        self._not_left.discard(actor)
        return super().died(actor, *args, **more)

    def timer(self, key: str, now: float) -> Sequence[Effect]:
        what, name, number = [*key.split(), "", ""][:3]
        if what == "leave":
            if key == self._leave_key:
                self._not_left.clear()
            return self._settle()
        unit = next((unit for unit in self._units if unit.name == name), None)
        if what == "ending":
            if unit is None or unit.death.number != int(number) or not unit.running:
                return []
            return [Kill(tuple(actor for actor in unit.actors if actor in unit.running))]
        if name and unit is None and what in ("startup", "back-off"):
            return []  # it has been removed
        return super().timer(key, now)

    # A scale

    def _settle(self) -> Sequence[Effect]:
        effects = [*super()._settle(), *self._connect()]
        return [*effects, *super()._settle(), *self._advance()]

    def _connect(self) -> Iterator[Effect]:
        scale = self._scale
        if scale is None or not scale.new or self.state is not State.SERVING or self._any_starting:
            return
        if not scale.connects:
            scale.connects = True
            yield Connect(tuple(actor for actors in scale.new.values() for actor in actors))

    def _add(self) -> Iterator[Effect]:
        assert self._scale is not None
        new, self._scale.new = self._scale.new, {}
        to = tuple(self._listeners())
        for name, actors in new.items():
            unit = Unit(name, actors)
            unit.death = self._change(unit, "is being added")
            self._units.append(unit)
            self._unit_of |= dict.fromkeys(actors, unit)
            self._fresh.add(name)
            yield TellAdded(to, unit.death.number, actors)
            yield from self._await_answers(to, unit.death.number)

    def _advance(self) -> Sequence[Effect]:
        scale = self._scale
        if scale is None or scale.new or self.state is not State.SERVING:
            return []
        self._fresh -= {unit.name for unit in self._units if unit.phase is Phase.UP}
        failed = [unit for unit in self._units if unit.name in self._fresh and unit.given_up]
        effects: list[Effect] = []
        if failed and not self._leaving:
            scale.error = self._reason(failed[0])
            effects += self._leave(self._added)
        if self._leaving:
            effects += self._end_leaving()
        elif not self._fresh:
            effects += self._give_up_scale("")
        return effects

    def _leave(self, names: list[str]) -> Iterator[Effect]:
        """These are to go: at once if they aren't UP, else when nobody uses them."""
        assert self._scale is not None
        self._leaving = list(names)
        working = [unit for unit in self._leavers() if unit.phase is Phase.UP]
        if not working:
            return
        clients = tuple(name for name in self._listeners() if name in self._clients)
        self._not_left = set(clients)
        yield TellLeaving(clients, tuple(actor for unit in working for actor in unit.actors))
        timer = self._timer(self._scale.drain_seconds, "leave")
        self._leave_key = timer.key
        yield timer

    def _end_leaving(self) -> Iterator[Effect]:
        for unit in self._leavers():
            if unit.name not in self._removed and self._may_end(unit):
                yield from self._end(unit)
        yield from super()._settle()
        if not self._may_disconnect():
            return
        gone = self._leavers()
        self._units = [unit for unit in self._units if unit not in gone]
        actors = tuple(actor for unit in gone for actor in unit.actors)
        for actor in actors:
            del self._unit_of[actor]
        for missed in self._missed.values():
            missed.difference_update(self._leaving)
        yield Disconnect(actors)
        assert self._scale is not None
        yield from self._give_up_scale(self._scale.error)
        self._fresh.clear()
        self._leaving.clear()
        self._removed.clear()

    def _may_end(self, unit: Unit) -> bool:
        """What has died is told of first."""
        if unit.phase is Phase.DOWN:
            return unit.told and not unit.running
        return unit.phase is Phase.STARTING or not self._not_left

    def _end(self, unit: Unit) -> Iterator[Effect]:
        self._removed.add(unit.name)
        running = tuple(actor for actor in unit.actors if actor in unit.running)
        unit.went_down(self._change(unit, "is removed"), 0.0)
        unit.given_up, unit.told = True, False
        for actor in unit.actors:
            self._unanswered.pop(actor, None)
            self._missed.pop(actor, None)
        for missed in self._missed.values():
            missed.add(unit.name)
        yield MarkDead(unit.actors)
        if running:
            yield Stop(running)
            yield Timer(STOP_SECONDS, f"ending {unit.name} {unit.death.number}")

    def _may_disconnect(self) -> bool:
        leavers = self._leavers()
        numbers = {unit.death.number for unit in leavers}
        return (
            self._removed == set(self._leaving)
            and all(unit.told and not unit.running for unit in leavers)
            and not any(numbers & deaths.keys() for deaths in self._unanswered.values())
            and not self._any_starting
        )

    def _give_up_scale(self, error: str) -> Iterator[Effect]:
        if self._scale is not None:
            self._scale = None
            yield ScaleEnded(len(self._replicas()), error)

    # What a scale changes of the rest

    def _fail(self, unit: Unit, user_error: bool, exit_code: int = 0) -> Sequence[Effect]:
        ended = self._give_up_scale(f"the server ends: {self._reason(unit)}")
        return [*ended, *super()._fail(unit, user_error, exit_code)]

    def _is_final(self, unit: Unit, user_error: bool) -> bool:
        unsure = unit.name in self._fresh or unit.name in self._leaving
        return super()._is_final(unit, user_error) and not (self._restarts and unsure)

    def _counts_on(self, unit: Unit) -> bool:
        unsure = unit.name in self._fresh or unit.name in self._leaving
        return super()._counts_on(unit) and not unsure

    def _tell_lost(self, unit: Unit, to: tuple[str, ...]) -> Iterator[Effect]:
        for effect in super()._tell_lost(unit, to):
            if isinstance(effect, TellLost) and unit.name in self._removed:
                yield msgspec.structs.replace(effect, removed=True)
            else:
                yield effect

    def _bring_up_to_date(self, actor: str) -> Iterator[Effect]:
        yield from super()._bring_up_to_date(actor)
        working = [unit for unit in self._leavers() if unit.phase is Phase.UP]
        if working and actor in self._clients:
            self._not_left.add(actor)
            yield TellLeaving((actor,), tuple(name for unit in working for name in unit.actors))

    # Who is there

    @property
    def _any_starting(self) -> bool:
        return any(unit.phase is Phase.STARTING for unit in self._units)

    def _replicas(self) -> list[Unit]:
        """By number."""
        units = [unit for unit in self._units if unit.name.startswith(f"{ENGINE}.")]
        return sorted(units, key=lambda unit: int(unit.name.partition(".")[2]))

    def _leavers(self) -> list[Unit]:
        return [unit for unit in self._units if unit.name in self._leaving]

    def _change(self, unit: Unit, what: str) -> Death:
        """The number by which it is answered is below 0: no death has it."""
        self._num_changes += 1
        return Death(-self._num_changes, unit.actors[-1], f"{unit.name} {what}", "")
