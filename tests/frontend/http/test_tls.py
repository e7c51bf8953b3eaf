"""https, with certificates made for the test."""

from __future__ import annotations

import asyncio
import shutil
import ssl
import subprocess
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from ringcast.frontend.http.tls import make_context
from ringcast.mq.config import build
from ringcast.mq.errors import ConfigError
from ringcast.mq.server_config import ServerConfig

pytestmark = pytest.mark.skipif(
    shutil.which("openssl") is None, reason="needs openssl, to make a certificate"
)
EC = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"]
FOR_LOCALHOST = ["-addext", "subjectAltName=IP:127.0.0.1"]


def openssl(folder: Path, *words: str) -> None:
    subprocess.run(["openssl", *words], cwd=folder, check=True, capture_output=True, timeout=30)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """cert.pem with key.pem signed by itself, and locked.pem: the key under a password."""
    folder = tmp_path_factory.mktemp("tls")
    made = ["-keyout", "key.pem", "-out", "cert.pem", "-days", "2", "-subj", "/CN=test"]
    openssl(folder, "req", "-x509", *EC, "-nodes", *made, *FOR_LOCALHOST)
    openssl(folder, "ec", "-in", "key.pem", "-out", "locked.pem", "-aes128", "-passout", "pass:x")
    both = (folder / "key.pem").read_text() + (folder / "cert.pem").read_text()
    (folder / "both.pem").write_text(both)
    return folder


def trusting(folder: Path) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(folder / "cert.pem"))


async def test_a_handshake(serve: Any, folder: Path) -> None:
    files = {
        "ssl_certfile": str(folder / "cert.pem"),
        "ssl_keyfile": str(folder / "key.pem"),
    }
    async with serve(**files) as server:
        assert server.url.startswith("https://")
        async with server.http.get("/health", ssl=trusting(folder)) as answer:
            assert answer.status == 200
        body = {"prompt": "hi", "stream": True}
        async with server.http.post("/v1/completions", json=body, ssl=trusting(folder)) as answer:
            assert (await answer.text()).endswith("data: [DONE]\n\n")
        with pytest.raises(aiohttp.ClientConnectorCertificateError):
            await server.http.get("/health")
        with pytest.raises(aiohttp.ClientError):
            await server.http.get(server.url.replace("https", "http") + "/health")


@pytest.mark.slow
async def test_nothing_stays_in_memory_of_handshakes_that_fail(
    serve: Any, folder: Path, alive: Any
) -> None:
    files = {
        "ssl_certfile": str(folder / "cert.pem"),
        "ssl_keyfile": str(folder / "key.pem"),
    }
    trusted = trusting(folder)
    async with serve(**files) as server:
        async with server.http.get("/health", ssl=trusted) as answer:
            assert answer.status == 200
        before = alive()
        no_tls, a_part = b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n", b"\x16\x03\x01"
        for said in [no_tls, a_part, b""] * 5:
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(said)
            writer.write_eof()
            await reader.read()
            writer.close()
        async with server.http.get("/health", ssl=trusted) as answer:
            assert answer.status == 200
        assert alive() == before


async def test_clients_that_must_show_a_certificate(serve: Any, folder: Path) -> None:
    options = {
        "ssl_certfile": str(folder / "both.pem"),
        "ssl_ca_certs": str(folder / "cert.pem"),
        "ssl_cert_reqs": 2,
    }
    async with serve(**options) as server:
        with pytest.raises((aiohttp.ClientError, ssl.SSLError)):
            await server.http.get("/health", ssl=trusting(folder))
        shown = trusting(folder)
        shown.load_cert_chain(folder / "cert.pem", folder / "key.pem")
        async with server.http.get("/health", ssl=shown) as answer:
            assert answer.status == 200


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"ssl_certfile": "missing.pem"}, "ssl_certfile = .*No such file"),
        ({"ssl_certfile": "cert.pem"}, "ssl_certfile = "),  # the key is not in it
        ({"ssl_certfile": "cert.pem", "ssl_keyfile": "locked.pem"}, "has a password"),
        ({"ssl_certfile": "both.pem", "ssl_ca_certs": "missing.pem"}, "ssl_ca_certs = "),
    ],
)
def test_files_that_cannot_be_used(folder: Path, options: dict[str, str], reason: str) -> None:
    files = {name: str(folder / file) for name, file in options.items()}
    with pytest.raises(ConfigError, match=reason):
        make_context(ServerConfig(**files))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"ssl_keyfile": "a"}, "ssl_keyfile = 'a': needs ssl_certfile"),
        ({"ssl_ca_certs": "a"}, "ssl_ca_certs = 'a': needs ssl_certfile"),
        ({"ssl_certfile": "a", "ssl_cert_reqs": 2}, "ssl_cert_reqs = 2: needs ssl_ca_certs"),
        ({"ssl_certfile": "a", "ssl_cert_reqs": 3}, "ssl_cert_reqs"),
    ],
)
def test_options_that_do_not_go_together(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        build(ServerConfig, options)
