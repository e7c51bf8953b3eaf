"""What the supervisor and the actors say to each other: beginnings, ends and deaths, and numbers.

It travels over a socket pair of each actor (actors/control.py), which is also its lifeline, beside
the channels with their requests and tokens (messages.py). One actor's life, seen from here:

    actor -> supervisor       Progress ..., Notice ..., ActorReady, Statistics ..., ActorFailed if
                              it fails
    supervisor -> actor       PeersLost (answered by PeersForgotten), PeersBack, Shutdown
    client <-> supervisor     TopologyReady, Listening; BeginDrain, Drained; TopologyFailed;
                              StatusRequest, Status; Profile, Profiled; Scale, Scaled
    supervisor -> actor       PeersAdded (answered by PeersForgotten), while it serves
    supervisor -> client      PeersLeaving (answered by PeersLeft)
    supervisor <-> worker     Profile, Profiled
    supervisor -> LLM         Attach, ActorProgress
"""

from __future__ import annotations

from .messages import Message


class Progress(Message, tag="progress"):
    """How far a slow start has come, for progress bars."""

    what: str
    done: int
    total: int


class ActorReady(Message, tag="ready"):
    """This actor does its work from now on.

    `details` are shown to the user (for a worker: dtype, blocks, ...).
    """

    details: dict[str, str | int | float] = {}


class ActorFailed(Message, tag="failed"):
    """Sent last by an actor that ends with an exception.

    exit_code: if it isn't 0, no restart would help, and the topology ends with it. from_outside: as
    in PeersLost.
    """

    error: str
    traceback: str
    user_error: bool = False
    exit_code: int = 0
    from_outside: bool = False


class Notice(Message, tag="notice"):
    """Something that people should know, in words; nothing follows from it."""

    text: str


class Drained(Message, tag="drained"):
    """A client has no request left, after BeginDrain."""


class Listening(Message, tag="listening"):
    """A client answers TopologyReady: it now takes requests, at `address`."""

    address: str


class StatusRequest(Message, tag="status?"):
    """Asks for a Status."""


class Statistics(Message, tag="statistics"):
    """A few named numbers that an actor publishes about itself, once a second while it works.

    On a headless host those of a scheduler are passed on to its gateway, and from there to the
    master's.
    """

    values: dict[str, float]


class Profile(Message, tag="profile"):
    """Asks all workers to start their profilers, or to stop them. Answered by Profiled.

    ask: any number that no other has, by which the answer is known.
    """

    ask: int
    start: bool


class Profiled(Message, tag="profiled"):
    """Answers Profile. report: for people, once they are stopped: files and tables. error: why it
    could not be done, in words for whoever asked. refused: it was his mistake.
    """

    ask: int
    report: str = ""
    error: str = ""
    refused: bool = False


class Scale(Message, tag="scale"):
    """Asks for so many replicas, and gives those that go so many seconds to end what runs there; or
    less than 0: --shutdown-timeout. Answered by Scaled, with the same `ask`."""

    ask: int
    replicas: int
    drain_seconds: float = -1.0


class Scaled(Message, tag="scaled"):
    """Answers Scale: there are so many replicas now. error: why not as many as asked for, in words,
    and the HTTP status of that (400: it can't be; 409: another scale is under way).
    """

    ask: int
    replicas: int
    error: str = ""
    status: int = 200


class PeersLeft(Message, tag="peers_left"):
    """Answers PeersLeaving: none of this client's requests is there any more."""


class PeersForgotten(Message, tag="peers_forgotten"):
    """Answers PeersLost, and PeersAdded by its number."""

    death: int


ActorToSupervisor = (
    Progress
    | ActorReady
    | ActorFailed
    | Notice
    | Listening
    | Drained
    | StatusRequest
    | Statistics
    | PeersForgotten
    | Profile
    | Profiled
    | Scale
    | PeersLeft
)


class BeginDrain(Message, tag="drain"):
    """Accept nothing new; answer Drained when all has ended, or was aborted at the deadline."""

    timeout: float


class Shutdown(Message, tag="shutdown"):
    """End now: close channels and exit 0."""


class TopologyFailed(Message, tag="topology_failed"):
    """To clients: the topology ends, because `actor` has died and doesn't come again.

    Whatever waits fails with this text. Clients answer Drained.
    """

    actor: str
    error: str
    traceback: str
    user_error: bool = False


class PeersLost(Message, tag="peers_lost"):
    """`actor` has died, and with it all of `lost`, which is restarted as one.

    Take in what they had sent, forget what they knew, send them nothing more, and then answer
    PeersForgotten(death). Nothing of what they were sent will be answered.

    from_outside: it was killed by somebody, and not for want of memory: hardly by what it computed.
    removed: it was ended because fewer replicas were asked for, by nobody's fault, and doesn't come
    again: close the channels with it.
    """

    death: int
    actor: str
    error: str
    traceback: str
    lost: list[str]
    from_outside: bool = False
    removed: bool = False


class PeersBack(Message, tag="peers_back"):
    """New incarnations of these are ready. They know nothing of what was before."""

    names: list[str]


class PeersAdded(Message, tag="peers_added"):
    """These are going to start, for the first time. Open the ends of the channels with them, and
    then answer PeersForgotten(number). PeersBack comes when they are ready.

    endpoints: as in Attach.
    """

    number: int
    names: list[str]
    endpoints: bytes


class PeersLeaving(Message, tag="peers_leaving"):
    """To clients: these will be removed. Send them nothing new; answer PeersLeft when none of your
    requests is there any more, which is not waited for for ever."""

    names: list[str]


class ActorStatus(Message):
    name: str
    pid: int
    state: str
    cpu_seconds: float
    rss_bytes: int
    restarts: int


class EdgeStatus(Message):
    """full_seconds: for how long the writer has had what doesn't fit; 0.0 if all fits. laggards:
    who has not read how much, in words, while it is full.
    """

    name: str
    capacity: int
    used: int
    records: int
    full_seconds: float = 0.0
    laggards: str = ""


class Status(Message, tag="status"):
    actors: list[ActorStatus]
    edges: list[EdgeStatus]
    statistics: dict[str, float]


class TopologyReady(Message, tag="topology_ready"):
    """To clients: every actor is ready, open the door. To a restarted client, once it is ready.

    `details` are those of the workers' ActorReady.
    """

    details: dict[str, str | int | float] = {}


class Attach(Message, tag="attach"):
    """To the client that is the process of an `LLM`, not the supervisor's child: its ends of the
    channels.

    endpoints is a MessagePack list of mq.endpoint.Endpoint; their descriptors come along
    (SCM_RIGHTS), in order.
    """

    endpoints: bytes


class ActorProgress(Message, tag="actor_progress"):
    """An actor's Progress, passed on to the process of an `LLM`."""

    actor: str
    progress: Progress


SupervisorToActor = (
    Statistics
    | BeginDrain
    | Shutdown
    | TopologyFailed
    | PeersLost
    | PeersBack
    | Status
    | TopologyReady
    | Attach
    | ActorProgress
    | Profile
    | Profiled
    | PeersAdded
    | PeersLeaving
    | Scaled
)
