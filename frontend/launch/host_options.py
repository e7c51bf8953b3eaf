"""What a headless host that Ray starts is told: the user's own options, and its place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...mq.cluster_config import ClusterConfig
from ...mq.config import EngineConfig

# Options that are the master's business, and may name files that are on the master alone.
_OF_THE_MASTER = ("chat_template",)
# Variables of the master that its nodes get. Those of paths are each host's own, and what is secret
# stays here.
_PREFIXES = ("RINGCAST_", "NCCL_")
_NOT = ("RINGCAST_API_KEY", "RINGCAST_CACHE")


def host_options(
    given: Mapping[str, Any], engine: EngineConfig, cluster: ClusterConfig
) -> dict[str, Any]:
    """The options of `ringcast serve` for the host of any one rank, but for the rank itself
    (data_parallel_start_rank) and the secret.

    given: the engine's, as the user wrote them; what the user didn't write, the host finds out for
    itself. cluster: the master's, with its address.
    """
    return {
        **{name: value for name, value in given.items() if name not in _OF_THE_MASTER},
        "device": engine.device,  # may have been auto, and means here what it means on the master
        "data_parallel_size": engine.data_parallel_size,
        "headless": True,
        "data_parallel_size_local": 1,
        "data_parallel_address": cluster.data_parallel_address,
        "data_parallel_rpc_port": cluster.data_parallel_rpc_port,
        "data_parallel_join_timeout": cluster.data_parallel_join_timeout,
    }


def host_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """What of the master's environment its nodes get."""
    return {
        name: value
        for name, value in environ.items()
        if name.startswith(_PREFIXES) and name not in _NOT
    }
