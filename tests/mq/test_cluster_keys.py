"""Keys come from the secret alone, and a secret that others could know is refused."""

from __future__ import annotations

import os

import pytest
import zmq

from ringcast.mq.cluster_keys import check_exposure, keys_of, read_secret
from ringcast.mq.errors import ConfigError

SECRET = bytes(range(32))


def test_every_host_computes_the_same_keys_and_no_other_secret_has_them():
    keys, same, other = keys_of(SECRET), keys_of(SECRET), keys_of(SECRET[::-1])
    assert keys == same
    publics = {keys.master.public, keys.node.public, other.master.public, other.node.public}
    assert len(publics) == 4
    assert zmq.curve_public(keys.node.secret) == keys.node.public


def test_the_derivation_stays_as_it_is():
    """Hosts of different builds would not understand why they refuse each other."""
    assert keys_of(SECRET).master.public == b"n(1MezeS3sh]^-!M#jAVR?.YY<H?C<WBt</Ak7:m"


def write(tmp_path, content: bytes, mode: int = 0o600) -> str:
    path = tmp_path / "secret"
    path.write_bytes(content)
    os.chmod(path, mode)
    return str(path)


def test_a_private_file_is_read_without_its_line_break(tmp_path):
    secret = b"0123456789abcdef0123456789abcdef"
    assert read_secret(write(tmp_path, secret + b"\n")) == secret


@pytest.mark.parametrize(
    ("content", "mode", "reason"),
    [
        (b"0123456789abcdef0123456789abcdef", 0o640, "mode 0640"),
        (b"0123456789abcdef0123456789abcde", 0o600, "31 bytes"),
        (b"a" * 64, 0o600, "1 of them different"),
        (b"", 0o600, "0 bytes"),
    ],
)
def test_a_secret_that_others_could_know_is_refused(tmp_path, content, mode, reason):
    path = write(tmp_path, content, mode)
    with pytest.raises(ConfigError, match=reason) as caught:
        read_secret(path)
    assert path in str(caught.value)


def test_a_missing_file_is_named():
    with pytest.raises(ConfigError, match=r"/nowhere/secret.*No such file"):
        read_secret("/nowhere/secret")


def test_only_loopback_goes_without_a_secret():
    assert check_exposure("127.0.0.1", has_secret=False) == "127.0.0.1"
    assert check_exposure("localhost", has_secret=False) in ("127.0.0.1", "::1")
    assert check_exposure("10.1.2.3", has_secret=True) == "10.1.2.3"
    for address in ("10.1.2.3", "0.0.0.0", "::"):
        with pytest.raises(ConfigError, match="needs cluster_secret_file"):
            check_exposure(address, has_secret=False)
