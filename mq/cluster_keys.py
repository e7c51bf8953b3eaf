"""The keys of a cluster: from one secret, which every host has in a file, to CURVE key pairs.

Both roles' pairs come from the secret by HKDF (RFC 5869, SHA-256), so each host can compute the
master's public key, which it connects to, and the public key of nodes, which alone the master lets
in. A host with another secret computes other keys, and CURVE doesn't let the two talk: not a byte
of ours is exchanged before both have shown that they have the same secret.

Without a secret a connection has neither keys nor encryption, and must not leave the host.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import ipaddress
import os
import socket
import stat
from pathlib import Path
from typing import Literal

import msgspec
import zmq
from zmq.utils import z85

from .errors import ConfigError

MIN_SECRET_BYTES = 32
_MIN_DISTINCT = 10  # different bytes in a secret: hexadecimal digits by chance have nearly all 16
_SALT = b"ringcast cluster keys 1"


class KeyPair(msgspec.Struct, frozen=True):
    """A CURVE key pair, in Z85 (40 characters each)."""

    public: bytes
    secret: bytes


class ClusterKeys(msgspec.Struct, frozen=True):
    """master: who listens. node: who connects, all with the same pair."""

    master: KeyPair
    node: KeyPair


def keys_of(secret: bytes) -> ClusterKeys:
    """The keys of a cluster whose secret this is."""
    return ClusterKeys(_pair(secret, "master"), _pair(secret, "node"))


def read_secret(path: str) -> bytes:
    """The secret in a file, without white space around it.

    Raises ConfigError, which names the file, if it can't be read, others may read it, or it could
    be guessed.
    """
    try:
        with open(Path(path).expanduser(), "rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            secret = file.read().strip()
    except OSError as error:
        raise ConfigError(f"cluster_secret_file = {path!r}: {error.strerror}") from error
    if mode & 0o077:
        raise ConfigError(
            f"cluster_secret_file = {path!r}: others than its owner may use it (mode {mode:04o}); "
            "make it mode 0600"
        )
    if len(secret) < MIN_SECRET_BYTES or len(set(secret)) < _MIN_DISTINCT:
        raise ConfigError(
            f"cluster_secret_file = {path!r}: {len(secret)} bytes, {len(set(secret))} of them "
            f"different; it must have at least {MIN_SECRET_BYTES}, drawn at random (as "
            "`openssl rand -hex 32` makes them)"
        )
    return secret


def check_exposure(address: str, has_secret: bool, option: str = "data_parallel_address") -> str:
    """The IP address of `address`, as `option` has it. Raises ConfigError if it needs a secret and
    there is none, or if there is no such host."""
    ip = _ip_of(option, address)
    if not has_secret and not ipaddress.ip_address(ip.partition("%")[0]).is_loopback:
        raise ConfigError(
            f"{option} = {address!r}: needs cluster_secret_file; without a secret, "
            "hosts are not told apart, and only a loopback address (127.0.0.1) is used"
        )
    return ip


def _ip_of(option: str, address: str) -> str:
    with contextlib.suppress(ValueError):
        return str(ipaddress.ip_address(address))
    try:
        found = socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(f"{option} = {address!r}: {error.strerror}") from error
    return str(found[0][4][0])


def _pair(secret: bytes, role: Literal["master", "node"]) -> KeyPair:
    """HKDF: extract from the secret, then expand to the 32 bytes of an X25519 key."""
    extracted = hmac.digest(_SALT, secret, hashlib.sha256)
    expanded = hmac.digest(extracted, role.encode() + b"\x01", hashlib.sha256)
    encoded = z85.encode(expanded)
    return KeyPair(zmq.curve_public(encoded), encoded)
