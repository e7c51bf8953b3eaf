"""Which ranks a host has, and what is refused with the option's name."""

from __future__ import annotations

import pytest

from ringcast.mq.cluster_config import ClusterConfig, ClusterPlace
from ringcast.mq.config import EngineConfig, build
from ringcast.mq.errors import ConfigError


def engine(size: int) -> EngineConfig:
    return build(EngineConfig, {"device": "fake", "data_parallel_size": size})


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
    with pytest.raises(ConfigError, match="on device cpu needs num_threads"):
        config(launcher="ray").local_ranks(build(EngineConfig, {"device": "cpu"}))


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
