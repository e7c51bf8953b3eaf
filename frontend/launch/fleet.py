"""What the launcher does with its replicas, without Ray: a table of phases and events.

    phase    | event                           | then     | and does
    ---------|---------------------------------|----------|-----------------------------------------
    PLACED   | launch                          | RUNNING  | Run
    RUNNING  | its headless host has ended, or | RESTING  | Ended: the master hears why; a Timer
             | Ray has given its actor up      |          |
    RESTING  | the timer                       | RUNNING  | Run

Each of them beside the others, and without end: a replica is never given up, as a headless host
that people start isn't. It rests for longer and longer, until it has run for a while.

When a node of Ray is lost, Ray itself finds new room and starts the actor there, which asks for
nothing of ours; so this is no event of the table. It is seen in where the rank has its room, and
told (`seen`): where it moves, or that there is no room for it.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

import msgspec

HOPELESS = 2  # the exit status that says: the user's mistake
_FIRST_REST = 1.0
_LONGEST_REST = 60.0
_LONG_ENOUGH = 60.0  # a run after which all is forgiven
_PATIENCE = 5.0  # without room until the master hears of it


class Run(msgspec.Struct, frozen=True):
    rank: int


class Ended(msgspec.Struct, frozen=True):
    """hopeless: it will end like this every time."""

    rank: int
    error: str
    hopeless: bool
    seconds: float


class Timer(msgspec.Struct, frozen=True):
    rank: int
    seconds: float


class Moved(msgspec.Struct, frozen=True):
    """The rank has its room elsewhere now."""

    rank: int
    place: str


class NoRoom(msgspec.Struct, frozen=True):
    rank: int


Effect = Run | Ended | Timer | Moved | NoRoom


class Phase(enum.Enum):
    PLACED = "placed"
    RUNNING = "running"
    RESTING = "resting"


class _Replica:
    def __init__(self, rank: int, place: str) -> None:
        self.rank = rank
        self.phase = Phase.PLACED
        self.place = place
        self.running_since = 0.0
        self.rest = _FIRST_REST
        self.homeless_since: float | None = None
        self.told = False


class Fleet:
    """places: of each rank, where Ray has found room for it. Times are in seconds."""

    def __init__(self, places: dict[int, str]) -> None:
        self._replicas = {rank: _Replica(rank, place) for rank, place in places.items()}

    def phase(self, rank: int) -> Phase:
        return self._replicas[rank].phase

    def launch(self, now: float) -> Sequence[Effect]:
        return [self._run(replica, now) for replica in self._replicas.values()]

    def ended(self, rank: int, status: int, said: str, now: float) -> Sequence[Effect]:
        """Its headless host has ended. said: its last lines."""
        place = self._replicas[rank].place
        error = f"the headless host of rank {rank} on {place} has ended with exit status {status}"
        return self._rest(rank, f"{error}:\n{said}" if said else error, status == HOPELESS, now)

    def given_up(self, rank: int, error: str, now: float) -> Sequence[Effect]:
        """Ray won't start its actor any more."""
        text = f"Ray can't start rank {rank} on {self._replicas[rank].place}: {error}"
        return self._rest(rank, text, True, now)

    def timer(self, rank: int, now: float) -> Sequence[Effect]:
        replica = self._replicas[rank]
        return [self._run(replica, now)] if replica.phase is Phase.RESTING else []

    def seen(self, rank: int, place: str | None, now: float) -> Sequence[Effect]:
        """Where the rank has its room; None while Ray looks for some."""
        replica = self._replicas[rank]
        if place is None:
            if replica.homeless_since is None:
                replica.homeless_since = now
            if replica.told or now - replica.homeless_since < _PATIENCE:
                return []
            replica.told = True
            return [NoRoom(rank)]
        replica.homeless_since, replica.told = None, False
        if place == replica.place:
            return []
        replica.place = place
        return [Moved(rank, place)]

    def _run(self, replica: _Replica, now: float) -> Run:
        replica.phase = Phase.RUNNING
        replica.running_since = now
        return Run(replica.rank)

    def _rest(self, rank: int, error: str, hopeless: bool, now: float) -> Sequence[Effect]:
        replica = self._replicas[rank]
        if replica.phase is not Phase.RUNNING:
            return []
        if now - replica.running_since >= _LONG_ENOUGH:
            replica.rest = _FIRST_REST
        seconds, replica.rest = replica.rest, min(2 * replica.rest, _LONGEST_REST)
        replica.phase = Phase.RESTING
        return [Ended(rank, error, hopeless, seconds), Timer(rank, seconds)]
