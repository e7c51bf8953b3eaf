"""One failure unit: what has died together, and when it may be started and be used again.

    phase    | event                                                       | then
    ---------|-------------------------------------------------------------|---------
    STARTING | all its actors are ready, and have answered all they were told | UP
    UP       | one of its actors died                                      | DOWN
    STARTING | one of its actors died (or was too slow, and was killed)    | DOWN
    DOWN     | another of its actors died (it was killed)                  | DOWN
    DOWN     | it waits for nothing any more                               | STARTING

DOWN waits until all its own processes are reaped and no other unit's are dying; until everyone who
was told of this death has answered, or has died; and until its back-off is over. A replica that is
given up is not started again (lifecycle.py).

Back-off: the first restart comes at once. A unit that dies again before it was ready, or within a
second of it, waits before each further restart, twice as long every time.
"""

from __future__ import annotations

import enum

import msgspec

STEADY_SECONDS = 1.0  # who has been ready for so long didn't die of its start
_FIRST_SECONDS = 0.25
_MOST_SECONDS = 8.0


class Phase(enum.Enum):
    STARTING = "starting"
    UP = "up"
    DOWN = "down"


class Death(msgspec.Struct, frozen=True):
    """number: counts all deaths of a topology; 0 is none."""

    number: int
    actor: str
    error: str
    traceback: str
    from_outside: bool = False


class Unit:
    """Starts out DOWN, with nothing to wait for."""

    def __init__(self, name: str, actors: tuple[str, ...]) -> None:
        self.name = name
        self.actors = actors
        self.phase = Phase.DOWN
        self.death = Death(0, "", "", "")
        self.running: set[str] = set()  # not reaped yet
        self.ready: set[str] = set()
        self.told = True  # the others of its last death
        self.backing_off = False
        self.given_up = False  # it stays DOWN
        self.deaths_in_a_row = self.our_deaths_in_a_row = 0
        self._ready_at: float | None = None

    @property
    def kind(self) -> str:
        return self.name.partition(".")[0]

    @property
    def all_ready(self) -> bool:
        return len(self.ready) == len(self.actors)

    def started(self) -> None:
        self.phase = Phase.STARTING
        self.running = set(self.actors)
        self._ready_at = None

    def became_ready(self, actor: str, now: float) -> None:
        self.ready.add(actor)
        if self.all_ready:
            self._ready_at = now

    def went_down(self, death: Death, now: float, ours: bool = True) -> None:
        """The first of its processes is reaped; `running` are those that remain to be. ours: its
        reason is on this host."""
        if self._ready_at is not None and now - self._ready_at >= STEADY_SECONDS:
            self.deaths_in_a_row = self.our_deaths_in_a_row = 0
        self.deaths_in_a_row += 1
        self.our_deaths_in_a_row += ours
        self.phase = Phase.DOWN
        self.death = death
        self.ready.clear()

    def back_off_seconds(self) -> float:
        if self.deaths_in_a_row <= 1:
            return 0.0
        exponent = min(self.deaths_in_a_row - 1, 16)
        return min(_MOST_SECONDS, _FIRST_SECONDS * 2.0**exponent)
