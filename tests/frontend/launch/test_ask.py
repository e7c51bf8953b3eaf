"""What a replica asks Ray for, and what is said when there is no room."""

from __future__ import annotations

import pytest

from ringcast.frontend.launch.ask import RayNode, ask_of, lack
from ringcast.mq.config import EngineConfig, build


@pytest.mark.parametrize(
    ("options", "ask"),
    [
        ({"device": "fake"}, {"CPU": 1.0}),
        ({"device": "cpu", "num_threads": 4, "tensor_parallel_size": 2}, {"CPU": 8.0}),
        (
            {"device": "cuda", "tensor_parallel_size": 2},
            {"CPU": 2.0, "GPU": 2.0},
        ),
    ],
)
def test_a_replica_asks_for_its_workers(options, ask):
    assert ask_of(build(EngineConfig, options)) == ask


SMALL, LARGE = RayNode("10.0.0.1", {"CPU": 4.0}), RayNode("10.0.0.2", {"CPU": 8.0, "GPU": 1.0})


def test_what_is_asked_for_and_what_there_is_are_named():
    assert lack([1], {"CPU": 8.0}, [SMALL, LARGE], {"CPU": 3.5}) == (
        "rank 1 waits for room on the Ray cluster: 8 CPU on one node. It has 10.0.0.2 (8 CPU, "
        "1 GPU), 10.0.0.1 (4 CPU, 0 GPU), of which 3.5 CPU, 0 GPU are free"
    )


def test_that_no_node_will_do_is_said():
    text = lack([0, 2, 3], {"CPU": 1.0, "GPU": 2.0}, [SMALL, LARGE], {})
    assert text.startswith(
        "ranks 0, 2 and 3 wait for room on the Ray cluster: 1 CPU, 2 GPU on one node, for each."
    )
    assert text.endswith("; none of them is large enough")


def test_a_large_cluster_is_not_listed_whole():
    nodes = [RayNode(f"10.0.0.{n}", {"CPU": float(n)}) for n in range(20)]
    text = lack([0], {"CPU": 100.0}, nodes, {})
    assert "10.0.0.19 (19 CPU, 0 GPU)" in text
    assert "and 12 more" in text
    assert "10.0.0.3 " not in text


def test_a_cluster_without_nodes():
    assert "It has no nodes, of which" in lack([0], {"CPU": 1.0}, [], {})
