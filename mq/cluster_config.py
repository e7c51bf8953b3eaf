"""The options of several hosts: which replicas this one has, and where the others are found."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Annotated

import msgspec
from msgspec import Meta

from .config import EngineConfig
from .errors import ConfigError

if TYPE_CHECKING:
    from .cluster_keys import ClusterKeys

_LAST_PORT = 65535


class ClusterConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one host is told of the others. Replicas have *ranks*, counted over all hosts."""

    headless: Annotated[
        bool,
        Meta(description="serve no HTTP: this host's replicas join the master, which does"),
    ] = False
    data_parallel_size_local: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(
            description="replicas on this host, of the data_parallel_size on all; all by default",
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
            "loopback address needs cluster_secret_file",
            extra={"short": "-dpa"},
        ),
    ] = "127.0.0.1"
    data_parallel_rpc_port: Annotated[
        int,
        Meta(
            ge=1,
            le=_LAST_PORT,
            description="the master listens for rank r at this port + r; with "
            "enable_expert_parallel also at this port + data_parallel_size + r",
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
            num = size
        if first + num > size:
            raise ConfigError(
                f"data_parallel_start_rank = {first}: this host's {num} replicas would end at rank "
                f"{first + num - 1}, and the last of data_parallel_size = {size} is {size - 1}"
            )
        if self.headless and num == size:
            raise ConfigError(
                f"data_parallel_size_local = {num}: a headless host must leave at least one of "
                f"data_parallel_size = {size} to the master"
            )
        ports = 2 * size if engine.lockstep else size
        if num < size and self.data_parallel_rpc_port + ports - 1 > _LAST_PORT:
            raise ConfigError(
                f"data_parallel_rpc_port = {self.data_parallel_rpc_port}: ranks 0 to {size - 1} "
                f"take {ports} ports from there; it must be at most {_LAST_PORT - ports + 1}"
            )
        return range(first, first + num)

    def port_of(self, rank: int) -> int:
        return self.data_parallel_rpc_port + rank

    def mirror_port_of(self, rank: int, size: int) -> int:
        """Where the master's mirror listens for the host whose first rank this is, of `size`."""
        return self.data_parallel_rpc_port + size + rank

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

    def next_session(self) -> ClusterPlace:
        """The place in the next life of replicas that step together; a node is told its session."""
        if self.config.headless:
            return self
        return msgspec.structs.replace(self, session=secrets.token_hex(8))
