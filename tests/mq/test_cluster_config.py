"""Which ranks a host has, and what is refused with the option's name."""

from __future__ import annotations

import msgspec
import pytest

from ringcast.mq.cluster_config import ClusterConfig, ClusterPlace
from ringcast.mq.config import EngineConfig, build
from ringcast.mq.errors import ConfigError


def engine(size: int, **more) -> EngineConfig:
    return build(EngineConfig, {"device": "fake", "data_parallel_size": size, **more})


def config(**options) -> ClusterConfig:
    return build(ClusterConfig, options)


def test_a_host_alone_has_all_ranks():
    assert config().local_ranks(engine(3)) == range(3)


def test_the_references_two_commands():
    node = config(headless=True, data_parallel_size_local=2, data_parallel_start_rank=0)
    master = config(data_parallel_size_local=2, data_parallel_start_rank=2)
    assert node.local_ranks(engine(4)) == range(2)
    assert master.local_ranks(engine(4)) == range(2, 4)
    assert node.port_of(1) == config().data_parallel_rpc_port + 1
    place = ClusterPlace(config=master, first=2, num=2, session="s")
    assert place.ranks == range(2, 4)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"data_parallel_start_rank": 1}, "data_parallel_start_rank = 1: .* end at rank 4"),
        ({"headless": True}, "data_parallel_size_local = 4: a headless host must leave"),
        (
            {"data_parallel_size_local": 1, "data_parallel_rpc_port": 65533},
            "data_parallel_rpc_port = 65533: .* at most 65532",
        ),
        (
            {"headless": True, "data_parallel_size_local": 0},
            "data_parallel_size_local = 0: a headless host has nothing but replicas",
        ),
        ({"ray_address": "local"}, "ray_address = 'local': needs launcher = 'ray'"),
        ({"launcher": "ray", "headless": True}, "launcher = 'ray': of no use on a headless host"),
        (
            {"launcher": "ray", "ray_address": "ray://head:10001"},
            "ray_address = 'ray://head:10001': must be auto, local or HOST:PORT",
        ),
        (
            {"launcher": "ray", "data_parallel_size_local": 4},
            "data_parallel_size_local = 4: with launcher = 'ray' it must be less than "
            "data_parallel_size = 4",
        ),
    ],
)
def test_what_cannot_be_is_refused(options, reason):
    with pytest.raises(ConfigError, match=reason):
        config(**options).local_ranks(engine(4))


def test_a_master_may_have_no_replica_and_has_none_where_ray_places_them():
    assert config(data_parallel_size_local=0).local_ranks(engine(1)) == range(0)
    assert config(launcher="ray").local_ranks(engine(2)) == range(0)
    assert config(launcher="ray", data_parallel_size_local=1).local_ranks(engine(2)) == range(1)


def test_a_headless_host_may_have_them_all_if_that_is_said():
    assert config(headless=True, data_parallel_size_local=1).local_ranks(engine(1)) == range(1)


def test_ray_is_not_asked_for_what_it_cannot_know():
    cuda = build(EngineConfig, {"device": "cuda", "data_parallel_size": 2})
    assert config(launcher="ray").local_ranks(cuda) == range(0)
    with pytest.raises(ConfigError, match=r"data_parallel_size_local = 1: .* cuda it must be 0"):
        config(launcher="ray", data_parallel_size_local=1).local_ranks(cuda)
    together = engine(2, enable_expert_parallel=True)
    with pytest.raises(ConfigError, match=r"with enable_expert_parallel .* must be 'local'"):
        config(launcher="ray", data_parallel_size_local=1).local_ranks(together)
    with pytest.raises(ConfigError, match="on device cpu needs num_threads"):
        config(launcher="ray").local_ranks(build(EngineConfig, {"device": "cpu"}))


def test_replicas_that_step_together_take_a_port_more_for_each_rank():
    together = engine(4, enable_expert_parallel=True)
    node = config(headless=True, data_parallel_size_local=2, data_parallel_start_rank=2)
    assert node.local_ranks(together) == range(2, 4)
    assert node.mirror_port_of(2, 4) == node.port_of(3) + 3
    low = config(data_parallel_size_local=1, data_parallel_rpc_port=65530)
    assert low.local_ranks(engine(4)) == range(1)
    with pytest.raises(ConfigError, match=r"= 65530: ranks 0 to 3 take 8 ports .* at most 65528"):
        low.local_ranks(together)


@pytest.mark.parametrize(("headless", "num"), [(False, 0), (True, 4)])
def test_where_they_do_each_host_has_some(headless, num):
    host = config(headless=headless, data_parallel_size_local=num)
    assert len(host.local_ranks(engine(4))) == num
    with pytest.raises(ConfigError, match=rf"_local = {num}: .* each host must have some"):
        host.local_ranks(engine(4, enable_expert_parallel=True))


def test_on_cuda_they_may_be_on_several_hosts():
    together = engine(4, enable_expert_parallel=True)
    msgspec.structs.force_setattr(together, "device", "cuda")
    assert config().local_ranks(together) == range(4)
    assert config(data_parallel_size_local=2).local_ranks(together) == range(2)


@pytest.mark.parametrize(
    ("options", "of_engine", "reason"),
    [
        ({"data_parallel_size_local": 1}, {"data_parallel_size": 2}, "_local = 1 must be 2"),
        ({"nnodes": 2}, {"tensor_parallel_size": 2}, "nnodes = 2 must be 1"),
    ],
)
def test_experts_on_devices_are_balanced_within_one_host(options, of_engine, reason):
    of_engine = of_engine | {"enable_expert_parallel": True, "enable_eplb": True}
    config = build(ClusterConfig, options)
    assert config.local_ranks(build(EngineConfig, of_engine | {"device": "cpu"}))
    with pytest.raises(ConfigError, match=reason):
        config.local_ranks(build(EngineConfig, of_engine | {"device": "cuda"}))


def test_only_a_secret_opens_an_address():
    assert config().ip() == "127.0.0.1"
    assert config().keys() is None
    with pytest.raises(ConfigError, match="needs cluster_secret_file"):
        config(data_parallel_address="10.0.0.1").ip()


def test_the_secret_files_keys(tmp_path):
    path = tmp_path / "secret"
    path.write_text("0123456789abcdef" * 4)
    path.chmod(0o600)
    with_secret = config(data_parallel_address="10.0.0.1", cluster_secret_file=str(path))
    assert with_secret.ip() == "10.0.0.1"
    assert with_secret.keys() is not None


# Hosts that share one engine


def shared(**options) -> EngineConfig:
    options = {"device": "fake", "tensor_parallel_size": 4, "pipeline_parallel_size": 2} | options
    return build(EngineConfig, options)


def test_every_node_has_its_share_of_the_workers():
    node = config(nnodes=4, node_rank=3, headless=True, master_port=7000)
    assert node.local_ranks(shared()) == range(1)
    assert [node.workers_of(n, 8) for n in range(4)] == [range(2 * n, 2 * n + 2) for n in range(4)]
    assert [node.node_port(n) for n in (1, 2, 3)] == [7000, 7001, 7002]
    places = [
        ClusterPlace(config=config(nnodes=4, node_rank=n), first=0, num=1, session="s")
        for n in range(4)
    ]
    assert [place.num_links for place in places] == [3, 1, 1, 1]
    assert all(place.spans for place in places)
    assert not ClusterPlace(config=config(), first=0, num=1, session="s").spans


@pytest.mark.parametrize("device", ["cpu", "cuda", "fake"])
def test_workers_of_any_device_may_be_on_several_hosts(device):
    assert config(nnodes=2).local_ranks(shared(device=device)) == range(1)


@pytest.mark.parametrize(
    ("options", "of_engine", "reason"),
    [
        ({"nnodes": 2, "node_rank": 2, "headless": True}, {}, "node_rank = 2: .* 0 to 1"),
        ({"nnodes": 2, "node_rank": 1}, {}, "node_rank = 1: .* add --headless here"),
        ({"nnodes": 2, "headless": True}, {}, "node_rank = 0: .* leave --headless away"),
        ({"nnodes": 3}, {}, "nnodes = 3: .* = 8 workers can't be dealt evenly"),
        ({"nnodes": 3, "master_port": 65535}, {"tensor_parallel_size": 3}, "at most 65534"),
        ({"nnodes": 2}, {"data_parallel_size": 2}, "data_parallel_size = 2: with nnodes = 2 it"),
        ({"nnodes": 2}, {"torch_profiler_dir": "x"}, "torch_profiler_dir = 'x': .*must be None"),
        (
            {"nnodes": 2, "data_parallel_start_rank": 1},
            {},
            "data_parallel_start_rank = 1: means nothing",
        ),
        ({"nnodes": 2, "data_parallel_rpc_port": 9}, {}, "data_parallel_rpc_port = 9: means"),
        ({"node_rank": 1}, {}, "node_rank = 1: means nothing with nnodes = 1"),
        ({"master_port": 5}, {}, "master_port = 5: means nothing"),
    ],
)
def test_what_nodes_cannot_be(options, of_engine, reason):
    with pytest.raises(ConfigError, match=reason):
        config(**options).local_ranks(shared(**of_engine))


def test_only_a_secret_opens_the_masters_address():
    with pytest.raises(
        ConfigError, match=r"master_addr = '10\.0\.0\.1': needs cluster_secret_file"
    ):
        config(nnodes=2, master_addr="10.0.0.1").ip()
