"""The supervisor's decisions, without its processes: a table of states and events.

    state      | event                    | then      | and does
    -----------|--------------------------|-----------|--------------------------------------------
    STARTING   | all actors are ready     | OPENING   | OpenDoor: clients get TopologyReady
    OPENING    | all clients listen       | SERVING   | Announce
    STARTING+  | an actor died            | FAILING   | TellDeath to clients; a short deadline
    any before | stop is asked for        | DRAINING  | Drain: clients refuse new work; a deadline
    DRAINING   | all clients have drained | STOPPING  | StopAll; a deadline
    DRAINING   | stop again, or deadline  | STOPPING  | StopAll; a deadline
    FAILING    | clients drained/deadline | STOPPING  | StopAll; a deadline
    STOPPING   | all actors are gone      | STOPPED   | Exit
    STOPPING   | stop again, or deadline  | STOPPING  | KillAll

Before SERVING there is nothing to drain, so a stop goes straight to STOPPING. A death while
STOPPING is what was asked for. The exit code is 0 when stopped on request, 1 after a death, 2 when
the death was the user's mistake (ConfigError).
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence

import msgspec

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


class OpenDoor(msgspec.Struct, frozen=True):
    pass


class Announce(msgspec.Struct, frozen=True):
    pass


class TellDeath(msgspec.Struct, frozen=True):
    actor: str
    error: str
    traceback: str
    user_error: bool


class Drain(msgspec.Struct, frozen=True):
    timeout: float


class StopAll(msgspec.Struct, frozen=True):
    pass


class KillAll(msgspec.Struct, frozen=True):
    pass


class Deadline(msgspec.Struct, frozen=True):
    """Call `deadline_passed(generation)` after so many seconds."""

    seconds: float
    generation: int


class Exit(msgspec.Struct, frozen=True):
    code: int


Effect = OpenDoor | Announce | TellDeath | Drain | StopAll | KillAll | Deadline | Exit


class Lifecycle:
    """actors: the names of all that were started; clients: those of them that talk to the outside.

    A client may be external (the process of an `LLM`): it is in `clients` and not in `actors`, and
    its death is a stop.
    """

    def __init__(
        self, actors: Iterable[str], clients: Iterable[str], shutdown_timeout: float
    ) -> None:
        self.state = State.STARTING
        self.exit_code = 0
        self._alive = set(actors)
        self._not_ready = set(self._alive)
        self._clients = set(clients)
        self._not_listening = set(self._clients)
        self._not_drained = set(self._clients)
        self._shutdown_timeout = shutdown_timeout
        self._generation = 0

    def ready(self, actor: str) -> Sequence[Effect]:
        self._not_ready.discard(actor)
        if self.state is State.STARTING and not self._not_ready:
            self.state = State.OPENING
            return [OpenDoor(), *self._if_listening()]
        return []

    def listening(self, client: str) -> Sequence[Effect]:
        self._not_listening.discard(client)
        return self._if_listening()

    def drained(self, client: str) -> Sequence[Effect]:
        self._not_drained.discard(client)
        if self.state in (State.DRAINING, State.FAILING) and not self._not_drained:
            return self._stop_all()
        return []

    def stop(self) -> Sequence[Effect]:
        """Somebody asked for the end: a signal, or the death of an external client."""
        if self.state is State.SERVING and self._shutdown_timeout > 0:
            self.state = State.DRAINING
            # The clients abort what is left at their deadline; ours comes after it.
            return [
                Drain(self._shutdown_timeout),
                self._deadline(self._shutdown_timeout + FAIL_SECONDS),
            ]
        if self.state is State.STOPPING:
            return [KillAll()]
        return self._stop_all()

    def died(
        self, actor: str, error: str, traceback: str = "", user_error: bool = False
    ) -> Sequence[Effect]:
        """A process is gone, for a reason if it gave one."""
        self._alive.discard(actor)
        self._not_drained.discard(actor)
        if self.state is State.STOPPING:
            return self._if_gone()
        if self.state is State.FAILING:
            return self.drained(actor)
        self.exit_code = 2 if user_error else 1
        self.state = State.FAILING
        told = TellDeath(actor, error, traceback, user_error)
        if not self._not_drained:
            return [told, *self._stop_all()]
        return [told, self._deadline(FAIL_SECONDS)]

    def deadline_passed(self, generation: int) -> Sequence[Effect]:
        if generation != self._generation:
            return []
        if self.state is State.STOPPING:
            return [KillAll()]
        return self._stop_all()

    def _if_listening(self) -> Sequence[Effect]:
        if self.state is State.OPENING and not self._not_listening:
            self.state = State.SERVING
            return [Announce()]
        return []

    def _stop_all(self) -> Sequence[Effect]:
        if self.state is State.STOPPED:
            return []
        self.state = State.STOPPING
        return [StopAll(), self._deadline(STOP_SECONDS), *self._if_gone()]

    def _if_gone(self) -> Sequence[Effect]:
        if self._alive:
            return []
        self.state = State.STOPPED
        return [Exit(self.exit_code)]

    def _deadline(self, seconds: float) -> Deadline:
        self._generation += 1
        return Deadline(seconds, self._generation)
