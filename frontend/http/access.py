"""Who may ask: the keys, and the middleware that lets in those who have one.

All but the paths in OPEN want a key, where there are keys at all. Those are what probes and
scrapers ask for, and the files of the page at /; they say nothing of any request. (vLLM guards only
what is below /v1; here /status and /reset_prefix_cache are guarded as well, and so is whatever is
added later.)
"""

from __future__ import annotations

import hashlib
import hmac
import math
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec
from aiohttp import web

from ...mq.errors import ConfigError
from ...mq.server_config import ServerConfig
from ...mq.tallies import Tallies
from .errors import Handler, RefusedError
from .limits import KeyLimits
from .web_page import PATHS

OPEN = PATHS | {"/health", "/ping", "/ready", "/version", "/metrics"}
VARIABLE = "RINGCAST_API_KEY"


def with_keys(server: ServerConfig, environ: Mapping[str, str]) -> ServerConfig:
    """The configuration with all keys in `api_key`, from wherever they are.

    Raises ConfigError, which shows no key, for what can't be one.
    """
    keys = list(server.api_key)
    if server.api_key_file is not None:
        keys += _read_keys(server.api_key_file)
    elif not keys and environ.get(VARIABLE):
        keys.append(environ[VARIABLE])
    for key in keys:
        if not key or not key.isascii() or not key.isprintable() or " " in key:
            raise ConfigError("api_key: a key is one or more visible ASCII characters, no blanks")
    if not keys:
        for name in ("max_concurrency_per_key", "max_requests_per_minute_per_key"):
            if getattr(server, name) is not None:
                raise ConfigError(f"{name} = {getattr(server, name)}: there are no keys: --api-key")
    return msgspec.structs.replace(server, api_key=keys, api_key_file=None)


def _read_keys(path: str) -> list[str]:
    """One a line; empty lines and those that begin with # don't count."""
    try:
        lines = Path(path).expanduser().read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read api_key_file {path}: {error}") from None
    keys = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    if not keys:
        raise ConfigError(f"api_key_file {path} holds no key")
    return keys


class Keys:
    """Compares in a time that tells nothing of the keys: digests, each with all of them."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = [_digest(key) for key in dict.fromkeys(keys)]

    def __len__(self) -> int:
        return len(self._digests)

    def find(self, authorization: str | None) -> int | None:
        """Which key an Authorization header shows, as a number; None if none of them."""
        scheme, _, token = (authorization or "").partition(" ")
        given = _digest(token.strip())
        found = None
        for number, digest in enumerate(self._digests):
            if hmac.compare_digest(given, digest):
                found = number
        return found if scheme.lower() == "bearer" else None


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


class Access:
    """The middleware. A key's limits are those of all API servers together."""

    def __init__(self, server: ServerConfig, tallies: Tallies) -> None:
        self._keys = Keys(server.api_key)
        self._limits = KeyLimits(
            tallies, server.max_concurrency_per_key, server.max_requests_per_minute_per_key
        )

    @web.middleware
    async def guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if not self._keys or request.path in OPEN:
            return await handler(request)
        key = self._keys.find(request.headers.get("Authorization"))
        if key is None:
            raise RefusedError(
                "this server wants an API key: Authorization: Bearer KEY"
                if "Authorization" not in request.headers
                else "that is none of this server's API keys",
                status=401,
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        if request.method != "POST":
            return await handler(request)
        refusal = self._limits.enter(key, time.monotonic())
        if refusal is not None:
            raise RefusedError(
                refusal.reason,
                status=429,
                code="rate_limit_exceeded",
                headers={"Retry-After": str(math.ceil(refusal.retry_after))},
            )
        try:
            return await handler(request)
        finally:
            self._limits.leave(key)
