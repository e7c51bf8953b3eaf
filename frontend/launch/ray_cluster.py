"""A Ray cluster, as the launcher uses it. Every call may block, and none needs an event loop.

`ray` is imported when a cluster is connected to, and nowhere else but here.
"""

from __future__ import annotations

import logging
import os
from typing import Any

from ...mq.errors import ConfigError, RingcastError
from .ask import RayNode
from .ray_host import CALLS_AT_ONCE, RayHost

ENDING_SECONDS = 10.0  # for a replica to end in order
_STORE_BYTES = 80 * 2**20  # about the least that Ray takes; nothing of ours is in it
_ACTOR_OPTIONS = {
    # Ray starts a lost actor elsewhere, and calls there again what was being called.
    "max_restarts": -1,
    "max_task_retries": -1,
    "max_concurrency": CALLS_AT_ONCE,
    # A worker of Ray that ends kills its children; ours has still to say good-bye, and ends by
    # itself (host_process.py).
    "runtime_env": {"env_vars": {"RAY_kill_child_processes_on_worker_exit": "0"}},
}


class RayError(RingcastError):
    """Ray can't do what it is asked for."""


class RayCluster:
    """Connected to by the constructor, as `RayCluster(address)`.

    Raises ConfigError without ray, and RayError if there is no such cluster.
    """

    def __init__(self, address: str) -> None:
        try:
            import ray
        except ModuleNotFoundError as error:
            raise ConfigError(f"launcher = 'ray': {error}; pip install 'ringcast[ray]'") from None
        self._ray: Any = ray
        self._groups: dict[int, Any] = {}
        self._actors: dict[int, Any] = {}
        own: dict[str, Any] = {}
        if address == "local":
            own = {"include_dashboard": False, "object_store_memory": _STORE_BYTES}
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        try:
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, **own)
        except Exception as error:  # whatever Ray has for this: RuntimeError, ConnectionError, ...
            raise RayError(f"no Ray cluster at --ray-address {address}: {error}") from error
        self.address: str = ray.util.get_node_ip_address()

    def reserve(self, rank: int, ask: dict[str, float]) -> None:
        """Ask for room; `wait` for it."""
        self._groups[rank] = self._ray.util.placement_group([ask], strategy="STRICT_PACK")

    def wait(self, rank: int, seconds: float) -> bool:
        """Whether there is room for this rank, within so long."""
        return bool(self._groups[rank].wait(seconds))

    def place(self, rank: int) -> str | None:
        """The node that has this rank's room, in words; None while Ray looks for some."""
        table = self._ray.util.placement_group_table(self._groups[rank])
        if table["state"] != "CREATED":
            return None
        (node_id,) = table["bundles_to_node_id"].values()
        for node in self._ray.nodes():
            if node["NodeID"] == node_id and node["Alive"]:
                return f"{node['NodeManagerAddress']} (node {node_id[:8]})"
        return None

    def nodes(self) -> list[RayNode]:
        return [
            RayNode(node["NodeManagerAddress"], dict(node["Resources"]))
            for node in self._ray.nodes()
            if node["Alive"]
        ]

    def free(self) -> dict[str, float]:
        return dict(self._ray.available_resources())

    def run(
        self,
        rank: int,
        ask: dict[str, float],
        options: dict[str, Any],
        secret: str,
        variables: dict[str, str],
    ) -> tuple[int, str]:
        """Run a rank's headless host until it ends. Returns its exit status and its last lines.

        Raises RayError if Ray gives its actor up.
        """
        if rank not in self._actors:
            self._actors[rank] = self._make_actor(rank, ask)
        try:
            status, said = self._ray.get(self._actors[rank].run.remote(options, secret, variables))
        except self._ray.exceptions.RayError as error:
            self._forget(rank)
            raise RayError(str(error)) from error
        return status, said

    def end(self) -> None:
        """End all replicas and give their room back."""
        actors = list(self._actors.values())  # a thread in `run` may still make one
        stops = [actor.stop.remote(ENDING_SECONDS) for actor in actors]
        if stops:  # one that is being started anew just now has nothing to end in order
            self._ray.wait(stops, num_returns=len(stops), timeout=ENDING_SECONDS)
        for rank in list(self._actors):
            self._forget(rank)
        for group in self._groups.values():
            self._ray.util.remove_placement_group(group)
        self._ray.shutdown()

    def _make_actor(self, rank: int, ask: dict[str, float]) -> Any:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        resources = dict(ask)
        where = PlacementGroupSchedulingStrategy(self._groups[rank], 0)
        return (
            self._ray.remote(RayHost)
            .options(
                num_cpus=resources.pop("CPU", 0),
                num_gpus=resources.pop("GPU", 0),
                resources=resources,
                scheduling_strategy=where,
                **_ACTOR_OPTIONS,
            )
            .remote()
        )

    def _forget(self, rank: int) -> None:
        actor = self._actors.pop(rank, None)  # `end` and a thread in `run` may both want this
        if actor is not None:
            self._ray.kill(actor, no_restart=True)
