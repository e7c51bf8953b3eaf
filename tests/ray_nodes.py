"""A Ray cluster of several nodes on this host, in a process of its own: python ray_nodes.py CPUS...

The head has no CPUs, and each other node so many as is said. It prints the cluster's address and
does what standard input says, a line at a time, with a line for each that is done: `kill N`, `add
CPUS`. It ends with its standard input.
"""

from __future__ import annotations

import sys

from ray.cluster_utils import Cluster

_STORE_BYTES = 80 * 2**20  # about the least that Ray takes; nothing of ours is in it


def main() -> None:
    head = {"num_cpus": 0, "object_store_memory": _STORE_BYTES, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    nodes = [_add(cluster, cpus) for cpus in sys.argv[1:]]
    _say(cluster.address)
    for line in sys.stdin:
        what, number = line.split()
        if what == "kill":
            cluster.remove_node(nodes[int(number)], allow_graceful=False)
        else:
            nodes.append(_add(cluster, number))
        _say(f"{line.strip()}: {nodes[-1].node_id[:8]}")
    cluster.shutdown()


def _add(cluster: Cluster, cpus: str):
    return cluster.add_node(num_cpus=int(cpus), object_store_memory=_STORE_BYTES)


def _say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    main()
