"""A headless host that Ray starts has the user's options, its place, and no secret."""

from __future__ import annotations

import yaml

from ringcast.frontend.cli import serve
from ringcast.frontend.cli.main import make_parser
from ringcast.frontend.cli.options import given_options, read_options
from ringcast.frontend.launch.host_options import host_options, host_variables
from ringcast.mq.cluster_config import ClusterConfig
from ringcast.mq.config import EngineConfig
from ringcast.mq.server_config import ServerConfig


def parse(*words: str):
    parser = make_parser("serve")
    serve.add_arguments(parser)
    return parser.parse_intermixed_args(list(words))


def on_the_host(tmp_path, rank: int, *words: str) -> tuple[EngineConfig, ClusterConfig]:
    """What the host's own command line comes to."""
    args = parse(*words)
    engine, cluster = read_options(args, EngineConfig), read_options(args, ClusterConfig)
    options = host_options(given_options(args, EngineConfig), engine, cluster)
    file = tmp_path / "options.yaml"
    file.write_text(yaml.safe_dump({**options, "data_parallel_start_rank": rank}))
    there = parse("--config", str(file))
    assert read_options(there, ServerConfig) == ServerConfig()
    return read_options(there, EngineConfig), read_options(there, ClusterConfig)


def test_it_has_the_users_options_and_its_place(tmp_path):
    words = (
        *("some-model", "--device", "fake", "-dp", "3", "-dpl", "1", "--launcher", "ray"),
        *("--max-num-seqs", "7", "--no-enable-prefix-caching", "--port", "99", "--api-key", "k"),
        *("--data-parallel-address", "10.0.0.1", "--data-parallel-rpc-port", "1300"),
        *("--chat-template", "/of/the/master", "--startup-timeout", "0.00001"),
    )
    engine, cluster = on_the_host(tmp_path, 2, *words)
    assert (engine.model, engine.device, engine.max_num_seqs) == ("some-model", "fake", 7)
    assert engine.enable_prefix_caching is False
    assert engine.chat_template is None
    assert engine.startup_timeout == 0.00001
    assert cluster.headless
    assert cluster.launcher == "local"
    assert cluster.local_ranks(engine) == range(2, 3)
    assert (cluster.data_parallel_address, cluster.port_of(2)) == ("10.0.0.1", 1302)
    assert cluster.cluster_secret_file is None


def test_what_the_user_did_not_say_the_host_finds_out_for_itself():
    args = parse("--device", "cpu", "--num-threads", "2", "-dp", "2")
    engine = read_options(args, EngineConfig)
    options = host_options(given_options(args, EngineConfig), engine, ClusterConfig())
    assert options["device"] == "cpu"
    assert options["num_threads"] == 2
    assert not {"dtype", "max_num_seqs", "max_num_batched_tokens"} & set(options)


def test_the_masters_device_is_the_hosts():
    args = parse("-dp", "2")
    engine = read_options(args, EngineConfig)
    assert engine.device != "auto"
    assert host_options({}, engine, ClusterConfig())["device"] == engine.device


def test_keys_and_paths_stay_on_the_master():
    environ = {
        **{"RINGCAST_API_KEY": "k", "RINGCAST_CACHE": "/here", "HF_TOKEN": "t", "PATH": "/bin"},
        **{"RINGCAST_FAKE_STEP_SECONDS": "0.1", "NCCL_DEBUG": "WARN"},
    }
    kept = {"RINGCAST_FAKE_STEP_SECONDS": "0.1", "NCCL_DEBUG": "WARN"}
    assert host_variables(environ) == kept
