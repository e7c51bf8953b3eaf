"""Which part of the process graph is on which host, when several share the replicas, or an engine.

The master has tokenizer, detokenizer, clients and its own replicas, and for each replica r that is
elsewhere a gateway in the place of scheduler.r. The host of that replica (a *node*) has its
scheduler and workers, and gateway.r in the place of all that this scheduler talks to. So a record
travels on the same edge on either host, and on the link between the two gateways in between:

    master    tokenizer.0 -> [scheduler.2]                     -> detokenizer.0
                                  |  ^           link of rank 2
    node                     [tokenizer.0 ... ] -> scheduler.2 -> [detokenizer.0 ...]

Where hosts share one engine (nnodes), its workers are dealt to them in order, and gateway.k on the
master plays those of node k, on node k all whom these talk to:

    master    scheduler.0 -> worker.0, [gateway.1]       [gateway.1] -> scheduler.0
                                            |  link of node 1  |
    node 1                             [gateway.1] -> worker.1 -> [gateway.1]

Names and numbers are the whole cluster's on every host. A gateway belongs to its engine's unit.

Replicas that step together are one unit on each host, and all of these are one, too: each host has
a mirror, which carries what its ranks write for the others to them (mirror.py), and ends with its
unit when that can't be done any more. It has the number of its host's first rank. Engines become
ready together, so the gateways' links come after the mirrors'.
"""

from __future__ import annotations

import msgspec

from ..mq.cluster_config import ClusterPlace
from ..mq.config import EngineConfig
from . import topology
from .topology import Channel

_MASTER_GATEWAY = "ringcast.actors.master_gateway:MasterGateway"
_RANKS_MASTER = "ringcast.actors.ranks_gateway:RanksMaster"
_RANKS_NODE = "ringcast.actors.ranks_gateway:RanksNode"


class Part(msgspec.Struct, frozen=True):
    """One host's part. units: as topology.units. targets: of actors with another shell than their
    kind's. remote: actors that wait for another host. patient: whether they may do so for any time
    from the start. clients: who speaks for the outside. gateways: on a node, each scheduler's."""

    instances: tuple[str, ...]
    units: dict[str, tuple[str, ...]]
    channels: list[Channel]
    clients: tuple[str, ...]
    targets: dict[str, str] = {}
    remote: tuple[str, ...] = ()
    patient: bool = False
    gateways: dict[str, str] = {}

    def target(self, name: str) -> str:
        """Where the shell of this actor lives, as "module:class"."""
        return self.targets.get(name) or topology.target(name.partition(".")[0])


def part_of(counts: dict[str, int], place: ClusterPlace | None) -> Part:
    """This host's part of the graph; without others, all of it."""
    everyone = topology.instances(counts)
    channels = topology.channels(counts)
    if place is None:
        return _part(counts, everyone, channels, "client.")
    if place.spans:
        return _of_an_engine(counts, place, everyone, channels)
    if place.config.headless:
        return _node(counts, place, everyone, channels)
    return _master(counts, place, everyone, channels)


def counts_on(counts: dict[str, int], place: ClusterPlace | None) -> dict[str, int]:
    """The counts as a host has them. Of one engine on several: a gateway for each node, numbered
    like these (0 is nowhere). Else on a node a gateway for each replica; and a mirror for each that
    could be a host's first one, if they step together."""
    if place is None:
        return counts
    if place.spans:
        return {**counts, "gateway": place.config.nnodes}
    more = {"gateway": counts["scheduler"]} if place.config.headless else {}
    if counts.get(topology.LOCKSTEP):
        more["mirror"] = counts["scheduler"]
    return {**counts, **more}


def engine_of_workers(
    engine: EngineConfig, counts: dict[str, int], place: ClusterPlace | None
) -> EngineConfig:
    """The options as this host's workers have them: with the replicas that share its devices."""
    num_here = topology.num_engines(counts) if place is None else place.num
    if engine.lockstep or num_here == engine.data_parallel_size:
        return engine
    return msgspec.structs.replace(
        engine, data_parallel_size=num_here, data_parallel_routing="score"
    )


def shares_memory(name: str, engine: EngineConfig, place: ClusterPlace | None) -> bool:
    """Whether this actor maps what ranks tell each other things through."""
    kind = name.partition(".")[0]
    if kind == "gateway":
        return place is not None and place.spans
    return kind == "mirror" or (kind == "worker" and (engine.num_workers > 1 or engine.lockstep))


def _of_an_engine(
    counts: dict[str, int], place: ClusterPlace, everyone: list[str], channels: list[Channel]
) -> Part:
    config, workers = place.config, topology.ranks_per_engine(counts)
    here, gateways = config.node_rank, {f"gateway.{n}" for n in range(1, config.nnodes)}
    player = {
        f"worker.{worker}": f"gateway.{node}"
        for node in range(config.nnodes)
        for worker in config.workers_of(node, workers)
        if node != here
    }
    if here:
        own = f"gateway.{here}"
        inside = {f"worker.{worker}" for worker in config.workers_of(here, workers)}
        player = {name: own for name in everyone if name not in inside}
        gateways = {own}
    present = [
        name
        for name in everyone
        if name in gateways or not (name in player or name.startswith("gateway."))
    ]
    kept = []
    for channel in channels:
        writer, *readers = (player.get(name, name) for name in (channel.writer, *channel.readers))
        others = tuple(dict.fromkeys(reader for reader in readers if reader != writer))
        real = {channel.writer, *channel.readers} & set(present)
        if others and real:
            kept.append(Channel(channel.name, writer, others, channel.messages))
    part = _part(counts, present, kept, "gateway." if here else "client.")
    return msgspec.structs.replace(
        part,
        targets=dict.fromkeys(gateways, _RANKS_NODE if here else _RANKS_MASTER),
        remote=tuple(name for name in present if name in gateways),
        patient=here > 0,
    )


def _master(
    counts: dict[str, int], place: ClusterPlace, everyone: list[str], channels: list[Channel]
) -> Part:
    elsewhere = {
        name
        for name in everyone
        if topology.engine_of(name, counts) is not None and not _is_here(name, counts, place)
    }
    gateways = [name for name in everyone if name in elsewhere and name.startswith("scheduler.")]
    here = [name for name in everyone if name not in elsewhere or name in gateways]
    kept = [channel for channel in channels if {channel.writer, *channel.readers} <= set(here)]
    part = _part(counts, here, kept, "client.")
    return msgspec.structs.replace(
        part,
        targets=dict.fromkeys(gateways, _MASTER_GATEWAY),
        remote=(*_mirrors(here), *gateways),
    )


def _node(
    counts: dict[str, int], place: ClusterPlace, everyone: list[str], channels: list[Channel]
) -> Part:
    here = [name for name in everyone if _is_here(name, counts, place)]
    kept = []
    for channel in channels:
        ends = (channel.writer, *channel.readers)
        inside = {topology.engine_of(name, counts) for name in ends} - {None}
        if not inside <= set(place.ranks) or not inside:
            continue
        (engine,) = inside
        played = [name if name in here else f"gateway.{engine}" for name in ends]
        kept.append(Channel(channel.name, played[0], tuple(played[1:]), channel.messages))
    gateways = {f"scheduler.{rank}": f"gateway.{rank}" for rank in place.ranks}
    part, mirrors = _part(counts, here, kept, "gateway."), _mirrors(here)
    return msgspec.structs.replace(part, gateways=gateways, remote=mirrors, patient=bool(mirrors))


def _is_here(name: str, counts: dict[str, int], place: ClusterPlace) -> bool:
    """Of an engine's actor."""
    engine = topology.engine_of(name, counts)
    return engine == place.first if name.startswith("mirror.") else engine in place.ranks


def _mirrors(here: list[str]) -> tuple[str, ...]:
    return tuple(name for name in here if name.startswith("mirror."))


def _part(counts: dict[str, int], here: list[str], channels: list[Channel], clients: str) -> Part:
    units = {
        unit: kept
        for unit, actors in topology.units(counts).items()
        if (kept := tuple(actor for actor in actors if actor in here))
    }
    return Part(
        instances=tuple(here),
        units=units,
        channels=channels,
        clients=tuple(name for name in here if name.startswith(clients)),
    )
