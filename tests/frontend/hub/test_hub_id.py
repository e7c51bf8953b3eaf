"""Against a server on this machine that speaks the part of the hub's protocol that is needed."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import close_session, constants

from ringcast.frontend.hub import hub_id, resolve_model
from ringcast.mq.config import EngineConfig
from ringcast.mq.errors import ModelLoadError

COMMIT = "0123456789abcdef0123456789abcdef01234567"
IGNORED = {
    "README.md": b"read me",
    "pytorch_model.bin": b"a pickle",
    "onnx/config.json": b"{}",
    "consolidated.safetensors": b"again",
    "code.py": b"raise SystemExit",
}


class Hub(ThreadingHTTPServer):
    """One model, "org/tiny", with branches main and other; "org/gated" asks for a login."""

    daemon_threads = True

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files = {path.name: path.read_bytes() for path in folder.iterdir()} | IGNORED
        self.fetched: set[str] = set()
        self.url = f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: Hub

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path.startswith("/api/models/org/gated"):
            self.refuse(403, "GatedRepo")
        elif path in ("/api/models/org/tiny/revision/main", "/api/models/org/tiny/revision/other"):
            siblings = [{"rfilename": name} for name in self.server.files]
            self.answer({"id": "org/tiny", "sha": COMMIT, "siblings": siblings})
        elif path == f"/api/models/org/tiny/tree/{COMMIT}":
            self.answer([self.entry(name) for name in self.server.files])
        elif path.startswith("/api/models/org/tiny/"):
            self.refuse(404, "RevisionNotFound")
        elif path.startswith("/org/tiny/resolve/"):
            self.give(path.split("/", 5)[5])
        else:
            self.refuse(404, "RepoNotFound")

    do_HEAD = do_GET

    def entry(self, name: str) -> dict[str, Any]:
        size, digest = len(self.server.files[name]), hashlib.sha1(name.encode()).hexdigest()
        return {"type": "file", "path": name, "size": size, "oid": digest}

    def give(self, name: str) -> None:
        content = self.server.files[name]
        self.send_response(200)
        self.send_header("ETag", f'"{hashlib.sha1(name.encode()).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command == "GET":
            self.server.fetched.add(name)
            self.wfile.write(content)

    def answer(self, value: Any) -> None:
        content = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def refuse(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("X-Error-Message", "no")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def hub(make_model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with Hub(make_model("source")) as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        template = server.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hf"))
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            close_session()
            server.shutdown()
            thread.join()


def test_fetches_what_a_model_is_made_of(hub: Hub, tmp_path: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    spec = resolve_model(EngineConfig(model="org/tiny"), lambda *args: seen.append(args))
    assert (spec.name, spec.max_model_len) == ("org/tiny", 64)
    assert Path(spec.path).is_relative_to(tmp_path / "hf")
    wanted = {"config.json", "tokenizer.json", "model.safetensors"}
    assert hub.fetched == wanted
    total = sum(len(hub.files[name]) for name in wanted)
    assert seen[0] == ("download", 0, 0)
    assert seen[-1][:2] == ("download", total)
    assert [done for _, done, _ in seen] == sorted(done for _, done, _ in seen)

    resolve_model(EngineConfig(model="org/tiny", revision="other"))


def test_dummy_weights_are_not_fetched(hub: Hub) -> None:
    resolve_model(EngineConfig(model="org/tiny", load_format="dummy"))
    assert hub.fetched == {"config.json", "tokenizer.json"}


def test_copy_serves_without_network(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    first = resolve_model(EngineConfig(model="org/tiny"))
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
    assert resolve_model(EngineConfig(model="org/tiny")) == first


@pytest.mark.parametrize(
    ("model", "revision", "reason"),
    [
        ("org/none", None, r"no model 'org/none' on the hub \(or it is private"),
        ("org/tiny", "v9", "the hub has 'org/tiny', but no revision 'v9' of it"),
        ("org/gated", None, "gives 'org/gated' only to those who accepted its terms"),
        ("org/x..y", None, "cannot fetch 'org/x..y' from the hub: "),
    ],
)
def test_refusals(hub: Hub, model: str, revision: str | None, reason: str) -> None:
    with pytest.raises(ModelLoadError, match=reason):
        resolve_model(EngineConfig(model=model, revision=revision))


def test_no_network_and_no_copy(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
    with pytest.raises(ModelLoadError, match=r"cannot fetch 'org/tiny' .*Connect.*takes a network"):
        resolve_model(EngineConfig(model="org/tiny"))


@pytest.mark.parametrize("text", ["org/name", "a/b", "Qwen/Qwen3-0.6B", "x1/y_z.w"])
def test_hub_ids(text: str) -> None:
    assert hub_id.is_hub_id(text)


@pytest.mark.parametrize("text", ["name", "/a", "a/", "a/b/c", "../b", "a b/c", "a/b c", ""])
def test_no_hub_ids(text: str) -> None:
    assert not hub_id.is_hub_id(text)
