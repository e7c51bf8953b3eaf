"""`ringcast serve --launcher ray`: a master whose other replicas are placed by Ray."""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
from collections.abc import Mapping
from typing import Any

import msgspec
import uvloop

from ...actors.reporter import Reporter
from ...actors.supervisor import Supervisor
from ...mq.cluster_config import ClusterConfig, ClusterPlace
from ...mq.cluster_keys import read_secret
from ...mq.config import EngineConfig, ModelSpec
from ...mq.launching import Launch, Place, Placed
from ...mq.server_config import ServerConfig
from ..launch.ask import ask_of
from ..launch.host_options import host_options, host_variables
from ..launch.host_process import secret_path
from ..launch.launcher import RayLauncher

_FOLDERS = ("model", "tokenizer")  # if they are no names


class RayMaster:
    """given: the engine's options as the user wrote them. has_address: whether the user has said
    where the master is."""

    def __init__(
        self,
        engine: EngineConfig,
        cluster: ClusterConfig,
        given: Mapping[str, Any],
        has_address: bool,
        reporter: Reporter,
    ) -> None:
        """Raises ConfigError for what can't work."""
        self._engine = engine
        self._cluster = cluster
        self._given = {name: _absolute(name, value) for name, value in given.items()}
        self._has_address = has_address
        self._reporter = reporter
        self._local = cluster.local_ranks(engine)
        path = cluster.cluster_secret_file
        # Nobody has to know it: whoever Ray starts is told.
        self._secret = secrets.token_hex(32) if path is None else read_secret(path).decode()
        self._supervisor: Supervisor | None = None

    def run(self, spec: ModelSpec, server: ServerConfig, listener: socket.socket) -> int:
        """Serve until the end. Returns the exit status."""
        code: int = uvloop.run(self._run(spec, server, listener))
        return code

    def notice(self, text: str) -> None:
        self._reporter.notice(text)

    def cannot_launch(self, error: str, user_error: bool) -> None:
        if self._supervisor is not None:
            self._supervisor.cannot_launch(error, user_error)

    async def _run(self, spec: ModelSpec, server: ServerConfig, listener: socket.socket) -> int:
        fd, path = secret_path(self._secret)
        try:
            async with RayLauncher(self._order(), self) as launcher:
                place = self._place(await launcher.place(), path)
                self._supervisor = Supervisor(
                    self._engine,
                    spec,
                    self._reporter,
                    server=server,
                    listener=listener,
                    cluster=place,
                )
                async with asyncio.TaskGroup() as group:
                    keeping = group.create_task(launcher.keep(self._launch(place.config)))
                    code = await self._supervisor.run()
                    keeping.cancel()
                return code
        finally:
            os.close(fd)

    def _order(self) -> Place:
        ranks = [n for n in range(self._engine.data_parallel_size) if n not in self._local]
        return Place(
            self._cluster.ray_address, ranks, ask_of(self._engine), self._engine.startup_timeout
        )

    def _place(self, placed: Placed, secret_file: str) -> ClusterPlace:
        changes = {"cluster_secret_file": secret_file}
        if not self._has_address:
            changes["data_parallel_address"] = placed.address
        config = msgspec.structs.replace(self._cluster, **changes)
        config.ip()  # what is wrong with it is said at once
        return ClusterPlace(
            config=config,
            first=self._local.start,
            num=len(self._local),
            session=secrets.token_hex(8),
        )

    def _launch(self, cluster: ClusterConfig) -> Launch:
        return Launch(
            host_options(self._given, self._engine, cluster),
            self._secret,
            host_variables(os.environ),
        )


def _absolute(name: str, value: Any) -> Any:
    """A folder here, in a way that names it on other hosts, too, if they have it."""
    if name in _FOLDERS and os.path.exists(os.path.expanduser(value or "")):
        return os.path.abspath(os.path.expanduser(value))
    return value
