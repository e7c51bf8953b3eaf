"""`ringcast serve --headless`: replicas, or workers of an engine that several hosts share, that
join the master of a cluster and serve no HTTP."""

from __future__ import annotations

import time
from typing import Any

import msgspec
import uvloop

from ...actors.joining import hello_of, join
from ...actors.reporter import Reporter
from ...actors.supervisor import Supervisor
from ...mq.cluster_config import ClusterConfig, ClusterPlace
from ...mq.config import EngineConfig, ModelSpec, build
from ...mq.errors import ConfigError, JoinAgainError
from ...mq.handshake import Welcome
from ...mq.link import LinkDialer


def run_node(
    engine: EngineConfig, spec: ModelSpec, cluster: ClusterConfig, reporter: Reporter
) -> int:
    """Join, serve, and join again whenever the master has been started anew. Returns the exit
    status."""
    while True:
        welcome, offset = uvloop.run(_knock(engine, spec, cluster, reporter))
        adopted, adopted_spec = adopt(engine, spec, welcome)
        ranks = cluster.local_ranks(engine)
        place = ClusterPlace(
            config=cluster,
            first=ranks.start,
            num=len(ranks),
            session=welcome.session,
            clock_offset=offset,
        )
        supervisor = Supervisor(adopted, adopted_spec, reporter, cluster=place)
        code: int = uvloop.run(supervisor.run())
        if code != JoinAgainError.exit_code:
            return code
        reporter.notice("joining again")


def adopt(
    engine: EngineConfig, spec: ModelSpec, welcome: Welcome
) -> tuple[EngineConfig, ModelSpec]:
    """The options and the model as the master has them.

    Raises ConfigError if they can't be had here.
    """
    options: dict[str, Any] = msgspec.structs.asdict(engine) | welcome.options
    options["max_model_len"] = welcome.max_model_len
    try:
        adopted = build(EngineConfig, options)
    except ConfigError as error:
        raise ConfigError(f"the master's options can't be had on this host: {error}") from None
    return adopted, msgspec.structs.replace(spec, max_model_len=welcome.max_model_len)


async def _knock(
    engine: EngineConfig, spec: ModelSpec, cluster: ClusterConfig, reporter: Reporter
) -> tuple[Welcome, float]:
    """The master's welcome, and what to add to our clock for its clock."""
    ranks, node = cluster.local_ranks(engine), cluster.node_rank
    port = cluster.port_of(ranks.start)
    if cluster.nnodes > 1:
        ranks, port = range(node, node + 1), cluster.node_port(node)
    dialer = LinkDialer(_Nobody(), cluster.ip(), port, cluster.keys())
    try:
        hello = hello_of(engine, spec, ranks, nnodes=cluster.nnodes)
        timeout = cluster.data_parallel_join_timeout
        welcome = await join(dialer, hello, timeout, reporter.notice)
        return welcome, welcome.clock - time.monotonic()
    finally:
        dialer.close()


class _Nobody:
    """Owns a link that is never made."""

    def on_record(self, record: Any) -> None: ...

    def on_message(self, message: Any) -> None: ...

    def on_room(self) -> None: ...

    def on_link_lost(self, error: Exception) -> None: ...
