"""The options of several hosts: which replicas this one has, and where the others are found."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
from msgspec import Meta

from .config import EngineConfig
from .errors import ConfigError

if TYPE_CHECKING:
    from .cluster_keys import ClusterKeys

_LAST_PORT = 65535


class ClusterConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one host is told of the others. Replicas have *ranks*, counted over all hosts."""

    launcher: Annotated[
        Literal["local", "ray"],
        Meta(
            description="who starts the replicas that aren't on this host: local, people, by "
            "ringcast serve --headless there; ray, a Ray cluster, as Ray finds room for them "
            "(pip install 'ringcast[ray]')",
            extra={"short": "--data-parallel-backend"},
        ),
    ] = "local"
    ray_address: Annotated[
        str,
        Meta(
            description="the Ray cluster: auto is the one that this host is a node of, HOST:PORT "
            "is one by its head, local starts one on this host alone. Launcher ray alone"
        ),
    ] = "auto"
    headless: Annotated[
        bool,
        Meta(description="serve no HTTP: this host's replicas join the master, which does"),
    ] = False
    data_parallel_size_local: Annotated[
        Annotated[int, Meta(ge=0)] | None,
        Meta(
            description="replicas on this host, of the data_parallel_size on all; by default all, "
            "and with launcher ray none that Ray hasn't placed there",
            extra={"short": "-dpl"},
        ),
    ] = None
    data_parallel_start_rank: Annotated[
        int,
        Meta(ge=0, description="rank of this host's first replica", extra={"short": "-dpr"}),
    ] = 0
    data_parallel_address: Annotated[
        str,
        Meta(
            description="the master's address: it listens there for headless hosts; any but a "
            "loopback address needs cluster_secret_file; with launcher ray it is the one that Ray "
            "knows, unless given",
            extra={"short": "-dpa"},
        ),
    ] = "127.0.0.1"
    data_parallel_rpc_port: Annotated[
        int,
        Meta(
            ge=1,
            le=_LAST_PORT,
            description="the master listens for rank r at this port + r",
            extra={"short": "-dpp"},
        ),
    ] = 29550
    data_parallel_join_timeout: Annotated[
        float,
        Meta(
            gt=0,
            description="seconds for which a headless host looks for its master, at its start and "
            "whenever it has lost it",
        ),
    ] = 600.0
    cluster_secret_file: Annotated[
        str | None,
        Meta(
            description="a file of mode 0600 with the same secret on every host: hosts prove it to "
            "each other, and what they say is encrypted"
        ),
    ] = None

    def local_ranks(self, engine: EngineConfig) -> range:
        """The ranks of this host's replicas. Raises ConfigError for what can't be."""
        size, first = engine.data_parallel_size, self.data_parallel_start_rank
        num = self.data_parallel_size_local
        if num is None:
            num = 0 if self.launcher == "ray" else size
        self._check_launcher(engine, num)
        if first + num > size:
            raise ConfigError(
                f"data_parallel_start_rank = {first}: this host's {num} replicas would end at rank "
                f"{first + num - 1}, and the last of data_parallel_size = {size} is {size - 1}"
            )
        if num < size and engine.lockstep:
            raise ConfigError(
                f"data_parallel_size_local = {num}: with enable_expert_parallel all of "
                f"data_parallel_size = {size} replicas must be on one host"
            )
        if self.headless and num == 0:
            raise ConfigError(
                "data_parallel_size_local = 0: a headless host has nothing but replicas; it must "
                "be 1 or more"
            )
        if self.headless and num == size and self.data_parallel_size_local is None:
            raise ConfigError(
                f"data_parallel_size_local = {num}: a headless host must leave at least one of "
                f"data_parallel_size = {size} to the master"
            )
        if num < size and self.data_parallel_rpc_port + size - 1 > _LAST_PORT:
            raise ConfigError(
                f"data_parallel_rpc_port = {self.data_parallel_rpc_port}: ranks 0 to {size - 1} "
                f"take as many ports from there; it must be at most {_LAST_PORT - size + 1}"
            )
        return range(first, first + num)

    def _check_launcher(self, engine: EngineConfig, num_local: int) -> None:
        if self.launcher == "local":
            if self.ray_address != "auto":
                raise ConfigError(f"ray_address = {self.ray_address!r}: needs launcher = 'ray'")
            return
        if self.headless:
            raise ConfigError(
                "launcher = 'ray': of no use on a headless host; it is the master's, which has Ray "
                "start the others"
            )
        if "://" in self.ray_address:
            raise ConfigError(
                f"ray_address = {self.ray_address!r}: must be auto, local or HOST:PORT; the master "
                "has to run on a node of the Ray cluster, and not through Ray Client"
            )
        if num_local >= engine.data_parallel_size:
            raise ConfigError(
                f"data_parallel_size_local = {num_local}: with launcher = 'ray' it must be less "
                f"than data_parallel_size = {engine.data_parallel_size}; else Ray has none to place"
            )
        if num_local and engine.device == "cuda":
            raise ConfigError(
                f"data_parallel_size_local = {num_local}: with launcher = 'ray' on device cuda it "
                "must be 0; Ray doesn't know the devices of replicas that it hasn't placed, and "
                "places others there"
            )
        if engine.device == "cpu" and engine.num_threads is None:
            raise ConfigError(
                "launcher = 'ray': on device cpu needs num_threads; Ray is asked for so many CPUs "
                "for each worker"
            )

    def port_of(self, rank: int) -> int:
        return self.data_parallel_rpc_port + rank

    def keys(self) -> ClusterKeys | None:
        """None without a secret. Raises ConfigError as `read_secret`."""
        from .cluster_keys import keys_of, read_secret  # ZeroMQ, which most actors do without

        path = self.cluster_secret_file
        return None if path is None else keys_of(read_secret(path))

    def ip(self) -> str:
        """The master's IP address. Raises ConfigError as `check_exposure`."""
        from .cluster_keys import check_exposure  # likewise

        return check_exposure(self.data_parallel_address, self.cluster_secret_file is not None)


class ClusterPlace(msgspec.Struct, frozen=True, kw_only=True):
    """One host's place in the cluster, as its actors are told.

    first, num: its ranks. session: see handshake.py. clock_offset: what to add to this host's
    `time.monotonic()` for the master's; 0.0 on the master.
    """

    config: ClusterConfig
    first: int
    num: int
    session: str
    clock_offset: float = 0.0

    @property
    def ranks(self) -> range:
        return range(self.first, self.first + self.num)
