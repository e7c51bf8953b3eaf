"""The process that Ray's actor starts: what it reads, and that it doesn't outlive its parent."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys

import msgspec
import pytest
from ports import free_ports
from serving import serve, until
from tiny_model import make_tiny_model

from ringcast.actors.linux import memory_fd
from ringcast.frontend.launch.host_process import HostBoot, secret_path
from ringcast.frontend.launch.ray_host import RayHost
from ringcast.mq.cluster_keys import read_secret

SECRET = "0123456789abcdef" * 4


def test_the_secret_is_read_by_its_path_while_its_owner_keeps_it():
    fd, path = secret_path(SECRET)
    assert read_secret(path) == SECRET.encode()
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    os.close(fd)
    assert not os.path.exists(path)


def test_the_actor_returns_the_status_and_the_last_words_of_what_it_ran(capsys):
    status, said = RayHost().run({"model": "/nowhere", "device": "fake"}, SECRET, {"LANG": "C"})
    assert status == 2
    assert "/nowhere" in said
    assert said in capsys.readouterr().err  # Ray's worker logs it


def test_a_stopped_actor_starts_nothing():
    host = RayHost()
    host.stop(1.0)
    assert host.run({"unknown": 1}, SECRET, {}) == (0, "")


def test_the_end_of_the_lifeline_ends_the_process():
    """It would look for a master that isn't there."""
    options = {
        **{"device": "fake", "load_format": "dummy", "headless": True},
        **{"data_parallel_size": 2, "data_parallel_size_local": 1, "data_parallel_start_rank": 1},
    }
    boot_fd = memory_fd(msgspec.msgpack.encode(HostBoot(options=options, secret=SECRET)))
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "ringcast.frontend.launch.host_process", str(boot_fd)],
        stdin=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        pass_fds=(boot_fd,),
    )
    os.close(boot_fd)
    process.stdin.close()
    assert process.wait(30) == -signal.SIGTERM


ACTOR = """
import json, sys
from ringcast.frontend.launch.ray_host import RayHost
RayHost().run(json.loads(sys.argv[1]), sys.argv[2], {})
"""


@pytest.mark.slow
def test_the_host_of_a_killed_actor_leaves_with_a_word(tmp_path):
    """So that no request is suspected. Nobody reads what it writes any more, which is no reason."""
    model, secret = make_tiny_model(tmp_path / "model"), tmp_path / "secret"
    secret.write_text(SECRET)
    secret.chmod(0o600)
    same = {
        **{"device": "fake", "load_format": "dummy", "num_gpu_blocks_override": 256},
        **{"data_parallel_size": 2, "data_parallel_size_local": 1},
        **{"data_parallel_rpc_port": free_ports(2)},
    }
    host = {**same, "model": str(model), "headless": True, "data_parallel_start_rank": 1}
    actor = subprocess.Popen(
        [sys.executable, "-P", "-c", ACTOR, json.dumps(host), SECRET], stderr=subprocess.DEVNULL
    )
    words = [word for name, value in same.items() for word in (f"--{name}", str(value))]
    try:
        with serve(model, *words, "--cluster-secret-file", str(secret)) as server:
            actor.kill()
            until(lambda: "waits for a node" in server.said)
            assert "has left: it is being shut down; rank 1 waits for a node" in server.said
    finally:
        actor.kill()
        actor.wait()
