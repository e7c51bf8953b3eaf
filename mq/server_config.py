"""The options of the HTTP server, once each: see config.py."""

from __future__ import annotations

from typing import Annotated, Literal
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The options of the HTTP server alone."""

    host: Annotated[str, Meta(description="address to bind")] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535, description="port to bind; 0 takes a free one")] = (
        8000
    )
    api_server_count: Annotated[
        int,
        Meta(
            ge=1,
            le=64,
            description="API server processes, which accept on the one port and share all replicas "
            "and limits",
        ),
    ] = 1
    served_model_name: Annotated[
        list[str], Meta(description="the names that clients use for the model")
    ] = []
    api_key: Annotated[
        list[str],
        Meta(
            description="keys of which clients must send one (Authorization: Bearer KEY); without "
            "this and --api-key-file, that of the variable RINGCAST_API_KEY, if it is set"
        ),
    ] = []
    api_key_file: Annotated[str | None, Meta(description="a file of more keys, one a line")] = None
    max_concurrency_per_key: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(description="requests that one key may have under way before it gets a 429"),
    ] = None
    max_requests_per_minute_per_key: Annotated[
        Annotated[int, Meta(ge=1, le=1_000_000)] | None,
        Meta(description="requests that one key may begin in any minute before it gets a 429"),
    ] = None
    ssl_certfile: Annotated[
        str | None, Meta(description="a PEM file of the server's certificate: serves https")
    ] = None
    ssl_keyfile: Annotated[
        str | None, Meta(description="a PEM file of its private key, if that is in another file")
    ] = None
    ssl_ca_certs: Annotated[
        str | None, Meta(description="a PEM file of who may sign the certificates of clients")
    ] = None
    ssl_cert_reqs: Annotated[
        int,
        Meta(
            ge=0, le=2, description="certificates of clients: 0 not asked for, 1 optional, 2 needed"
        ),
    ] = 0
    allowed_origins: Annotated[
        list[str],
        Meta(description="web pages' origins that browsers may let in (CORS); * is any"),
    ] = []
    allowed_methods: Annotated[
        list[str], Meta(description="methods that such pages may use; any by default")
    ] = []
    allowed_headers: Annotated[
        list[str], Meta(description="headers that such pages may send; any by default")
    ] = []
    allow_credentials: Annotated[
        bool, Meta(description="let such pages send cookies and certificates")
    ] = False
    max_body_bytes: Annotated[int, Meta(ge=1024, description="largest request body")] = 4 << 20
    enable_auto_tool_choice: Annotated[
        bool, Meta(description="let the model call tools as it sees fit; needs tool_call_parser")
    ] = False
    tool_call_parser: Annotated[
        Literal[
            "deepseek_v3",
            "hermes",
            "llama3_json",
            "mistral",
            "pythonic",
            "qwen3_coder",
            "qwen3_xml",
        ]
        | None,
        Meta(description="how this model writes tool calls"),
    ] = None
    reasoning_parser: Annotated[
        Literal["deepseek_r1", "mistral", "qwen3"] | None,
        Meta(description="how this model marks its reasoning, which is given apart from the text"),
    ] = None
    header_timeout: Annotated[
        float, Meta(gt=0, description="seconds for a client to send a request's headers")
    ] = 20.0
    body_timeout: Annotated[
        float, Meta(gt=0, description="seconds for a client to send a request's body")
    ] = 60.0
    keep_alive_timeout: Annotated[
        float, Meta(gt=0, description="seconds that a connection may be idle between requests")
    ] = 75.0
    max_client_lag: Annotated[
        float,
        Meta(
            gt=0,
            description="seconds that a client may leave its full connection unread before it is "
            "dropped and its request ended",
        ),
    ] = 30.0
    disable_access_log: Annotated[bool, Meta(description="no line in the log for each request")] = (
        False
    )
    otlp_traces_endpoint: Annotated[
        str | None,
        Meta(
            description="an OpenTelemetry collector's URL (OTLP over HTTP, such as "
            "http://localhost:4318/v1/traces), to which each request goes as a span"
        ),
    ] = None
    disable_page: Annotated[
        bool, Meta(description="no page at /, with its live picture and its chat")
    ] = False
    disable_log_stats: Annotated[
        bool, Meta(description="no line of throughput every 10 s while there is work")
    ] = False

    def __post_init__(self) -> None:
        if self.ssl_certfile is None:
            for name in ("ssl_keyfile", "ssl_ca_certs"):
                if (path := getattr(self, name)) is not None:
                    raise ValueError(f"{name} = {path!r}: needs ssl_certfile")
        if self.ssl_cert_reqs and self.ssl_ca_certs is None:
            raise ValueError(f"ssl_cert_reqs = {self.ssl_cert_reqs}: needs ssl_ca_certs")
        if self.allow_credentials and (not self.allowed_origins or "*" in self.allowed_origins):
            raise ValueError(
                "allow_credentials = True: needs allowed_origins by name; with * any page on the "
                "web could act for its visitors"
            )
        if self.enable_auto_tool_choice and self.tool_call_parser is None:
            raise ValueError("enable_auto_tool_choice = True: needs tool_call_parser")
        self._check_traces()

    def _check_traces(self) -> None:
        if (endpoint := self.otlp_traces_endpoint) is None:
            return
        url = urlsplit(endpoint)
        if url.scheme not in ("http", "https") or not url.hostname or url.path in ("", "/"):
            raise ValueError(
                f"otlp_traces_endpoint = {endpoint!r}: must be the whole URL for OTLP over HTTP "
                "(gRPC isn't there), such as http://localhost:4318/v1/traces"
            )
