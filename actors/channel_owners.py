"""All channels of a topology, as the supervisor holds them: made before their ends are opened, and
kept for later incarnations."""

from __future__ import annotations

import resource
from collections.abc import Collection, Iterable, Iterator

from ..mq import segment, socket_folder, supervision
from ..mq.config import EngineConfig
from ..mq.endpoint import ChannelOwner, Endpoint
from ..mq.errors import ConfigError
from ..mq.socket_folder import SocketFolder
from .topology import Channel


class ChannelOwners:
    """Iterates over the channels."""

    def __init__(self, engine: EngineConfig) -> None:
        self._engine = engine
        self._folder: SocketFolder | None = None
        self._owners: list[ChannelOwner] = []

    def __iter__(self) -> Iterator[ChannelOwner]:
        return iter(self._owners)

    def prepare(self) -> None:
        """Put away what others have left that were killed. Before the first channel is made."""
        segment.reap()
        socket_folder.reap()
        if self._engine.transport == "zmq":
            self._folder = SocketFolder()

    def make(self, channels: Iterable[Channel]) -> None:
        """Make those of these that there aren't yet. Raises ConfigError if there is no room."""
        names = {owner.name for owner in self._owners}
        for channel in channels:
            if channel.name in names:
                continue
            try:
                self._owners.append(self._make(channel))
            except OSError as error:
                most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
                raise ConfigError(
                    f"the channel {channel.name} can't be made: {error} (this process may have "
                    f"{most} descriptors, and a channel takes three or more: ulimit -n)"
                ) from error

    def _make(self, channel: Channel) -> ChannelOwner:
        return ChannelOwner.create(
            transport=self._engine.transport,
            name=channel.name,
            writer=channel.writer,
            readers=channel.readers,
            messages=channel.messages,
            ring_bytes=self._engine.ring_bytes,
            folder=self._folder.path if self._folder is not None else "",
        )

    def named(self, name: str) -> ChannelOwner:
        return next(owner for owner in self._owners if owner.name == name)

    def of(self, actor: str) -> list[ChannelOwner]:
        """Those that this actor has an end of."""
        return [owner for owner in self._owners if actor in (owner.writer, *owner.readers)]

    def endpoints(
        self, actor: str, others: Collection[str] | None = None
    ) -> tuple[list[Endpoint], list[int]]:
        """An actor's ends of its channels, or of those with these others alone, and all descriptors
        that they need."""
        owners = self.of(actor)
        if others is not None:
            owners = [o for o in owners if not {o.writer, *o.readers}.isdisjoint(others)]
        endpoints = [owner.endpoint(actor) for owner in owners]
        return endpoints, [fd for endpoint in endpoints for fd in endpoint.fds]

    def mark_dead(self, actors: Iterable[str]) -> None:
        for actor in actors:
            for owner in self.of(actor):
                owner.mark_dead(actor)

    def revive(self, actors: Collection[str]) -> None:
        """Before these are started again: nothing waits for them, and nobody takes them for
        dead."""
        for actor in actors:
            for owner in self.of(actor):
                if actor in owner.readers:
                    owner.reset(actor)
        for actor in actors:  # only now: nobody writes into a channel while it's being reset
            for owner in self.of(actor):
                owner.mark_alive(actor)

    def drop(self, actors: Iterable[str]) -> None:
        """Close the channels of these, for good."""
        gone = [owner for actor in actors for owner in self.of(actor)]
        self._owners = [owner for owner in self._owners if owner not in gone]
        for owner in gone:
            owner.close()

    def status(self) -> list[supervision.EdgeStatus]:
        return [_status(owner) for owner in self._owners]

    def close(self) -> None:
        for owner in self._owners:
            owner.close()
        if self._folder is not None:
            self._folder.remove()


def _status(owner: ChannelOwner) -> supervision.EdgeStatus:
    stats = owner.stats()
    seconds, laggards = owner.full()
    return supervision.EdgeStatus(
        owner.name, stats.capacity, stats.used, stats.records, seconds, laggards
    )
