"""What a headless host is told by its options, and what it takes from its master."""

from __future__ import annotations

import pytest

from ringcast.frontend.cli.headless import adopt
from ringcast.frontend.cli.serve import place_of
from ringcast.mq.cluster_config import ClusterConfig
from ringcast.mq.config import EngineConfig, ModelSpec, build
from ringcast.mq.errors import ConfigError
from ringcast.mq.handshake import FROM_MASTER, Welcome

SPEC = ModelSpec(
    name="m",
    path="",
    tokenizer_path="",
    architecture="A",
    vocab_size=9,
    max_model_len=512,
    eos_token_ids=[],
    hf_config={},
)


def engine(**options) -> EngineConfig:
    return build(EngineConfig, {"device": "fake", "data_parallel_size": 4, **options})


def welcome(master: EngineConfig) -> Welcome:
    options = {name: getattr(master, name) for name in FROM_MASTER}
    return Welcome("n", "s", 1.0, 0, max_model_len=128, options=options)


def test_a_host_alone_has_no_place_among_others():
    assert place_of(ClusterConfig(), engine()) is None


def test_a_headless_host_has_a_place_though_it_has_all_replicas():
    place = place_of(ClusterConfig(headless=True, data_parallel_size_local=4), engine())
    assert place is not None
    assert place.ranks == range(4)


def test_each_life_of_a_master_is_a_session_of_its_own():
    config = ClusterConfig(data_parallel_size_local=1)
    places = [place_of(config, engine()) for _ in range(2)]
    assert all(place is not None and place.ranks == range(1) for place in places)
    assert len({place.session for place in places if place is not None}) == 2


def test_an_open_address_without_a_secret_is_refused_at_once():
    config = ClusterConfig(data_parallel_size_local=1, data_parallel_address="10.0.0.1")
    with pytest.raises(ConfigError, match="needs cluster_secret_file"):
        place_of(config, engine())


def test_the_masters_options_win_and_what_is_of_the_host_stays():
    ours = engine(seed=1, block_size=8, num_threads=None, ring_bytes=1 << 17)
    adopted, spec = adopt(ours, SPEC, welcome(engine(seed=7, block_size=32, max_num_seqs=3)))
    assert (adopted.seed, adopted.block_size, adopted.max_num_seqs) == (7, 32, 3)
    assert adopted.ring_bytes == 1 << 17
    assert adopted.max_model_len == spec.max_model_len == 128


def test_what_this_host_cannot_do_is_refused():
    theirs = welcome(engine())
    theirs.options["kv_cache_dtype"] = "fp8"
    with pytest.raises(
        ConfigError, match=r"master's options can't be had on this host: .*kv_cache_dtype"
    ):
        adopt(build(EngineConfig, {"device": "cpu"}), SPEC, theirs)
