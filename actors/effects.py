"""What the lifecycle wants done. The supervisor (or a simulation) carries it out, in order."""

from __future__ import annotations

import msgspec


class Start(msgspec.Struct, frozen=True):
    """Start these, which are not running: with nothing in the channels into them (what a dead
    incarnation left there included), and no longer marked dead in any of theirs."""

    actors: tuple[str, ...]


class Kill(msgspec.Struct, frozen=True):
    """End these with SIGKILL. Each one's `died` follows."""

    actors: tuple[str, ...]


class MarkDead(msgspec.Struct, frozen=True):
    """Mark these dead in all their channels, so that what is sent to them is dropped."""

    actors: tuple[str, ...]


class TellLost(msgspec.Struct, frozen=True):
    """PeersLost to each of `to` (which may be nobody); each answers `forgotten(itself, death)`.

    from_outside, removed: as in PeersLost. final: it isn't started again, and the others go on
    without it.
    """

    to: tuple[str, ...]
    death: int
    actor: str
    error: str
    traceback: str
    lost: tuple[str, ...]
    from_outside: bool = False
    final: bool = False
    removed: bool = False


class TellBack(msgspec.Struct, frozen=True):
    """PeersBack to each of `to` (which may be nobody)."""

    to: tuple[str, ...]
    names: tuple[str, ...]


class Connect(msgspec.Struct, frozen=True):
    """Make the channels of these, which are new, and say `connected` or `cannot_connect` before all
    else. They are not running."""

    actors: tuple[str, ...]


class TellAdded(msgspec.Struct, frozen=True):
    """PeersAdded to each of `to`, with its ends of the channels of `added`; each answers
    `forgotten(itself, number)`."""

    to: tuple[str, ...]
    number: int
    added: tuple[str, ...]


class TellLeaving(msgspec.Struct, frozen=True):
    """PeersLeaving to each of these clients; each answers `left(itself)`."""

    to: tuple[str, ...]
    names: tuple[str, ...]


class Stop(msgspec.Struct, frozen=True):
    """Shutdown to these. Each one's `died` follows."""

    actors: tuple[str, ...]


class Disconnect(msgspec.Struct, frozen=True):
    """These are no more: close their channels. Nobody uses an end of them any more."""

    actors: tuple[str, ...]


class ScaleEnded(msgspec.Struct, frozen=True):
    """The scale is over, and there are so many replicas. error: why not as many as asked for."""

    replicas: int
    error: str


class OpenDoor(msgspec.Struct, frozen=True):
    """TopologyReady to these clients."""

    clients: tuple[str, ...]


class Announce(msgspec.Struct, frozen=True):
    """Say that it serves now."""


class TellFailed(msgspec.Struct, frozen=True):
    """TopologyFailed to all clients that live."""

    actor: str
    error: str
    traceback: str
    user_error: bool


class Drain(msgspec.Struct, frozen=True):
    """BeginDrain to all clients that live."""

    timeout: float


class StopAll(msgspec.Struct, frozen=True):
    """Shutdown to all who live. Who isn't ready is killed: it may not listen, and loses nothing."""


class KillAll(msgspec.Struct, frozen=True):
    """End all who live with SIGKILL."""


class Timer(msgspec.Struct, frozen=True):
    """Call `timer(key, now)` after so many seconds. No two timers have the same key."""

    seconds: float
    key: str


class Exit(msgspec.Struct, frozen=True):
    code: int


Effect = (
    Start
    | Kill
    | MarkDead
    | TellLost
    | TellBack
    | Connect
    | TellAdded
    | TellLeaving
    | Stop
    | Disconnect
    | ScaleEnded
    | OpenDoor
    | Announce
    | TellFailed
    | Drain
    | StopAll
    | KillAll
    | Timer
    | Exit
)
