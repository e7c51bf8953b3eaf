"""TLS: the server's certificate, and whose certificates it asks for."""

from __future__ import annotations

import ssl

from ...mq.errors import ConfigError
from ...mq.server_config import ServerConfig


def make_context(server: ServerConfig) -> ssl.SSLContext | None:
    """None without a certificate: the server speaks plain HTTP then. Raises ConfigError."""
    if server.ssl_certfile is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(server.ssl_certfile, server.ssl_keyfile, _no_password)
        if server.ssl_ca_certs is not None:
            context.load_verify_locations(server.ssl_ca_certs)
    except OSError as error:  # ssl.SSLError is one
        names = ", ".join(
            f"{name} = {path!r}"
            for name in ("ssl_certfile", "ssl_keyfile", "ssl_ca_certs")
            if (path := getattr(server, name)) is not None
        )
        raise ConfigError(f"{names}: {error.strerror or error}") from None
    context.verify_mode = ssl.VerifyMode(server.ssl_cert_reqs)
    return context


def _no_password() -> str:
    raise ConfigError("ssl_keyfile: the key has a password, which nobody is here to type")
