"""The options of several hosts: what this one has, and where the others are found.

Hosts share replicas (data_parallel_size_local), or one engine's workers (nnodes).
"""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
from msgspec import Meta

from .config import EngineConfig
from .errors import ConfigError

if TYPE_CHECKING:
    from .cluster_keys import ClusterKeys

_LAST_PORT = 65535

# What is as it is by default with nnodes, and what without.
_OF_SEVERAL_REPLICAS = (
    "data_parallel_start_rank",
    "data_parallel_address",
    "data_parallel_rpc_port",
)
_OF_SEVERAL_NODES = ("node_rank", "master_addr", "master_port")


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
        Meta(description="serve no HTTP: this host's replicas, or workers, join the master"),
    ] = False
    nnodes: Annotated[
        int,
        Meta(
            ge=1,
            le=64,
            description="hosts that one engine's workers are spread over, evenly and in their "
            "order (tensor_parallel_size of each stage of pipeline_parallel_size)",
            extra={"short": "-n"},
        ),
    ] = 1
    node_rank: Annotated[
        int,
        Meta(
            ge=0,
            description="this host's number among nnodes; 0 is the master, all others are headless",
            extra={"short": "-r"},
        ),
    ] = 0
    master_addr: Annotated[
        str,
        Meta(
            description="the address at which node 0 listens for the others of nnodes; any but a "
            "loopback address needs cluster_secret_file"
        ),
    ] = "127.0.0.1"
    master_port: Annotated[
        int,
        Meta(ge=1, le=_LAST_PORT, description="node 0 listens for node k at this port + k - 1"),
    ] = 29501
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
        if self._spans_nodes(engine):
            _check_balancer(engine, f"nnodes = {self.nnodes}", "1")
            return range(1)
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
        if engine.lockstep and num == (size if self.headless else 0):
            raise ConfigError(
                f"data_parallel_size_local = {num}: with enable_expert_parallel each host must "
                f"have some of data_parallel_size = {size} replicas, the master, too"
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
        if num < size:
            _check_balancer(engine, f"data_parallel_size_local = {num}", str(size))
        ports = 2 * size if engine.lockstep else size
        if num < size and self.data_parallel_rpc_port + ports - 1 > _LAST_PORT:
            raise ConfigError(
                f"data_parallel_rpc_port = {self.data_parallel_rpc_port}: ranks 0 to {size - 1} "
                f"take {ports} ports from there; it must be at most {_LAST_PORT - ports + 1}"
            )
        return range(first, first + num)

    def workers_of(self, node: int, num_workers: int) -> range:
        """Which of an engine's workers are on this node."""
        share = num_workers // self.nnodes
        return range(node * share, (node + 1) * share)

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
        if engine.lockstep:
            raise ConfigError(
                "launcher = 'ray': with enable_expert_parallel and several replicas, which step "
                "together, it must be 'local'"
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

    def node_port(self, node: int) -> int:
        return self.master_port + node - 1

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

        option = "data_parallel_address" if self.nnodes == 1 else "master_addr"
        return check_exposure(getattr(self, option), self.cluster_secret_file is not None, option)

    def _spans_nodes(self, engine: EngineConfig) -> bool:
        """Whether nnodes share one engine. Raises ConfigError for what can't be."""
        num, workers, local = self.nnodes, engine.num_workers, self.data_parallel_size_local
        if num == 1:
            self._refuse(_OF_SEVERAL_NODES, "means nothing with nnodes = 1")
            return False
        if self.node_rank >= num:
            raise ConfigError(
                f"node_rank = {self.node_rank}: nnodes = {num} are numbered 0 to {num - 1}"
            )
        if self.headless != (self.node_rank > 0):
            raise ConfigError(
                f"node_rank = {self.node_rank}: node 0 serves HTTP, and all others are headless; "
                f"{'leave --headless away here' if self.headless else 'add --headless here'}"
            )
        if workers % num:
            raise ConfigError(
                f"nnodes = {num}: tensor_parallel_size x pipeline_parallel_size = {workers} "
                "workers can't be dealt evenly to so many hosts"
            )
        if self.node_port(num - 1) > _LAST_PORT:
            raise ConfigError(
                f"master_port = {self.master_port}: nodes 1 to {num - 1} take as many ports from "
                f"there; it must be at most {_LAST_PORT - num + 2}"
            )
        for option, value, accepted in (
            ("data_parallel_size", engine.data_parallel_size, 1),
            ("data_parallel_size_local", 1 if local is None else local, 1),
            ("launcher", self.launcher, "local"),
            ("ray_address", self.ray_address, "auto"),
            ("torch_profiler_dir", engine.torch_profiler_dir, None),
        ):
            if value != accepted:
                raise ConfigError(
                    f"{option} = {value!r}: with nnodes = {num} it must be {accepted!r}"
                )
        self._refuse(_OF_SEVERAL_REPLICAS, f"means nothing with nnodes = {num}")
        return True

    def _refuse(self, options: tuple[str, ...], why: str) -> None:
        """Those of these that have another value than by default."""
        defaults = {field.name: field.default for field in msgspec.structs.fields(self)}
        for option in options:
            if (value := getattr(self, option)) != defaults[option]:
                raise ConfigError(f"{option} = {value!r}: {why}")


class ClusterPlace(msgspec.Struct, frozen=True, kw_only=True):
    """One host's place in the cluster, as its actors are told.

    first, num: its ranks. session: see handshake.py. clock_offset: what to add to this host's
    `time.monotonic()` for the master's; 0.0 on the master. With nnodes, the one rank is on all.
    """

    config: ClusterConfig
    first: int
    num: int
    session: str
    clock_offset: float = 0.0

    @property
    def ranks(self) -> range:
        return range(self.first, self.first + self.num)

    @property
    def spans(self) -> bool:
        """Whether one engine's workers are on several hosts."""
        return self.config.nnodes > 1

    @property
    def num_links(self) -> int:
        """Hosts with which this one shares an engine directly: all talk to the master."""
        return 1 if self.config.node_rank else self.config.nnodes - 1

    def next_session(self) -> ClusterPlace:
        """The place in the next life of replicas that step together; a node is told its session."""
        if self.config.headless:
            return self
        return msgspec.structs.replace(self, session=secrets.token_hex(8))


def _check_balancer(engine: EngineConfig, option: str, other: str) -> None:
    """Raises ConfigError: on devices it moves experts among those of one host."""
    if engine.enable_eplb and engine.device == "cuda":
        raise ConfigError(
            f"enable_eplb = True: on device 'cuda' experts are moved between the devices of one "
            f"host; {option} must be {other}, or enable_eplb False"
        )
