"""`ringcast serve`: an OpenAI-compatible server for one model."""

from __future__ import annotations

import argparse
import ipaddress
import os
import secrets
import time
from collections.abc import Sequence

import msgspec
import uvloop

from ...actors.effects import TellFailed, TellLost
from ...actors.reporter import say
from ...actors.supervisor import Supervisor
from ...mq import supervision
from ...mq.cluster_config import ClusterConfig, ClusterPlace
from ...mq.config import EngineConfig
from ...mq.errors import ConfigError
from ...mq.server_config import ServerConfig
from ..http.access import with_keys
from ..http.listener import bind
from ..http.tls import make_context
from ..hub import resolve_model
from ..metrics.span_exporter import check as check_traces
from .headless import run_node
from .options import add_options, given_options, read_options
from .progress import StartProgress
from .ray_master import RayMaster


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_options(parser, EngineConfig)
    add_options(parser, ServerConfig)
    add_options(parser, ClusterConfig)


def run(args: argparse.Namespace) -> int:
    start = time.monotonic()
    engine = read_options(args, EngineConfig)
    cluster = read_options(args, ClusterConfig)
    place = place_of(cluster, engine)
    server = read_options(args, ServerConfig)
    if place is not None and place.config.headless:
        if server.api_server_count > 1:
            raise ConfigError(
                f"api_server_count = {server.api_server_count}: a headless host serves no HTTP; "
                "give it to the master"
            )
        return _run_headless(engine, place.config, start)
    server = with_keys(server, os.environ)
    make_context(server)  # what is wrong with the certificate is said at once
    check_traces(server.otlp_traces_endpoint)
    with bind(server.host, server.port) as listener, StartProgress() as progress:
        if (warning := exposure(server, listener.getsockname()[0])) is not None:
            say(warning)
        spec = resolve_model(engine, progress.on_model)
        if not server.served_model_name:
            server = msgspec.structs.replace(server, served_model_name=[spec.name])
        reporter = ConsoleReporter(progress, server.served_model_name[0], start)
        if cluster.launcher == "ray":
            given = given_options(args, EngineConfig)
            has_address = "data_parallel_address" in given_options(args, ClusterConfig)
            master = RayMaster(engine, cluster, given, has_address, reporter)
            return master.run(spec, server, listener)
        supervisor = Supervisor(
            engine, spec, reporter, server=server, listener=listener, cluster=place
        )
        code: int = uvloop.run(supervisor.run())
        return code


def place_of(cluster: ClusterConfig, engine: EngineConfig) -> ClusterPlace | None:
    """This host's place, if there are several, and Ray hasn't still to be asked for it.

    Raises ConfigError for what can't work.
    """
    ranks = cluster.local_ranks(engine)
    alone = len(ranks) == engine.data_parallel_size and not cluster.headless
    if (alone and cluster.nnodes == 1) or cluster.launcher == "ray":
        return None
    cluster.ip()
    cluster.keys()  # what is wrong with either is said at once
    return ClusterPlace(
        config=cluster, first=ranks.start, num=len(ranks), session=secrets.token_hex(8)
    )


def _run_headless(engine: EngineConfig, cluster: ClusterConfig, start: float) -> int:
    with StartProgress() as progress:
        spec = resolve_model(engine, progress.on_model)
        return run_node(engine, spec, cluster, NodeReporter(progress, spec.name, start))


class ConsoleReporter:
    """Says on stderr how the topology does."""

    def __init__(self, progress: StartProgress, model: str, start: float) -> None:
        self._progress = progress
        self._model = model
        self._start = start

    def progress(self, actor: str, progress: supervision.Progress) -> None:
        self._progress.update(actor, progress.what, progress.done, progress.total)

    def serving(self, details: dict[str, str | int | float], addresses: list[str]) -> None:
        self._progress.stop()
        seconds = time.monotonic() - self._start
        say(f"{self._model}: {_in_words(details) or 'all replicas are on other hosts'}")
        say(f"ready in {seconds:.1f} s at {' and '.join(addresses)}/v1  (Ctrl-C ends it)")

    def notice(self, text: str) -> None:
        say(text)

    def draining(self, timeout: float) -> None:
        say(f"ending: running requests have {timeout:g} s (again Ctrl-C ends at once)")

    def lost(self, death: TellLost) -> None:
        if death.traceback:
            say(death.traceback.rstrip())
        names = " and ".join(death.lost)
        if death.final:
            say(f"{death.error}; {names} stay down, and the other replicas go on")
        else:
            say(f"{death.error}; restarting {names}")

    def back(self, names: Sequence[str], seconds: float) -> None:
        say(f"{' and '.join(names)} back after {seconds:.1f} s")

    def failed(self, death: TellFailed) -> None:
        self._progress.stop()
        if death.traceback and not death.user_error:
            say(death.traceback.rstrip())
        say(f"ringcast: {death.error}")


class NodeReporter(ConsoleReporter):
    """The same of a headless host."""

    def serving(self, details: dict[str, str | int | float], addresses: list[str]) -> None:
        self._progress.stop()
        seconds = time.monotonic() - self._start
        if details:  # the first worker's, which may be on another host
            say(f"{self._model}: {_in_words(details)}")
        say(f"{' and '.join(addresses)} ready in {seconds:.1f} s  (Ctrl-C ends it)")


def _in_words(details: dict[str, str | int | float]) -> str:
    """What the worker says of itself, without what only matters when looking for a fault."""
    words = []
    for name, value in details.items():
        if name.endswith("_bytes") and isinstance(value, int):
            words.append(f"{name.removesuffix('_bytes').replace('_', ' ')} {value / 1e6:,.0f} MB")
        elif name == "device":
            words.append(str(value))
        elif name in ("dtype", "threads", "linear", "attention", "num_blocks"):
            words.append(f"{name.replace('_', ' ')} {value}")
    return ", ".join(words)


def exposure(server: ServerConfig, address: str) -> str | None:
    """A warning, if others than this machine's users may use the server. address: as bound."""
    if server.api_key or ipaddress.ip_address(address.partition("%")[0]).is_loopback:
        return None
    return (
        f"warning: whoever can reach {server.host} may use this server: it has no key (--api-key)"
    )
