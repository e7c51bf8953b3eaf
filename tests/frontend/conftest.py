"""An engine without processes for the tests of what people touch, and a server on a real socket."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import inspect
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import numpy as np
import pytest
import uvloop
from tiny_model import make_tiny_model

from ringcast.actors.scaling import ScaleAsks
from ringcast.actors.text.event_renderer import EventRenderer
from ringcast.actors.text.logprob_rows import LogprobRow, pack_rows
from ringcast.actors.text.parsers.output_parser import OutputParser
from ringcast.actors.text.text_tokenizer import load_tokenizer
from ringcast.actors.text.tokenizer_core import TokenizerCore
from ringcast.frontend.client import EngineClient
from ringcast.frontend.http.app import make_app
from ringcast.frontend.http.http_server import HttpServer
from ringcast.frontend.http.listener import bind
from ringcast.frontend.loop_thread import LoopThread
from ringcast.frontend.metrics.recorder import Recorder
from ringcast.mq import codec, messages, supervision
from ringcast.mq.config import EngineConfig, ModelSpec, build
from ringcast.mq.errors import EngineDeadError
from ringcast.mq.messages import (
    Abort,
    Accepted,
    Chunk,
    Chunks,
    Detokenize,
    ErrorInfo,
    Finish,
    Generate,
    Ping,
    Rejected,
    ResetPrefixCache,
    Tokenize,
    TokensPrompt,
)
from ringcast.mq.server_config import ServerConfig

WORDS = ["Hello", ",", " wörld", " 🌍", "!"]
TEXT_IDS = [7, 8, 9]  # what the fake tokenizer makes of any text


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine on a loop of its own, on which it may leave no task."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    arguments = {name: pyfuncitem.funcargs[name] for name in names}

    async def run() -> None:
        broken: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: broken.append(context))
        await pyfuncitem.obj(**arguments)
        if tasks := asyncio.all_tasks() - {asyncio.current_task()}:
            _, left = await asyncio.wait(tasks, timeout=1)
            assert not left, f"tasks are left: {left}"
        assert not broken, f"errors in callbacks: {broken}"

    async def bounded() -> None:
        async with asyncio.timeout(20):
            await run()

    uvloop.run(bounded())
    return True


async def until(condition: Callable[[], bool]) -> None:
    """Wait for what may be changed by anyone, on any thread."""
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0.001)


@pytest.fixture(name="until")
def fixture_until() -> Any:
    return until


@dataclasses.dataclass
class FakeEngine:
    """Answers each Generate with `words`, one token and one chunk each, as the actors would.

    hold: stop after so many tokens until aborted. reject: refuse what is sent from now on.
    fail: end every choice with this error after its words. deaf: answer no pings and no resets.
    tokenizer: answers what is asked of the tokenizer, if anything is.
    checkpoint: where no deltas are asked for, a chunk whenever so many tokens have gathered.
    """

    words: list[str] = dataclasses.field(default_factory=lambda: list(WORDS))
    hold: int | None = None
    reject: ErrorInfo | None = None
    fail: ErrorInfo | None = None
    deaf: bool = False
    checkpoint: int = 64
    tokenizer: TokenizerCore | None = None
    num_cached_tokens: int = 0
    num_prompt_tokens: int = 7
    sent: list[Any] = dataclasses.field(default_factory=list)
    deliver: Callable[[str, Any], None] | None = None
    die: Callable[[EngineDeadError], None] | None = None

    def __post_init__(self) -> None:
        self._aborted: set[str] = set()
        self._num_running = 0
        self._tasks: set[asyncio.Task[None]] = set()

    def send(self, to: str, message: Any) -> None:
        assert to == "tokenizer.0"
        # What can't be encoded can't be sent.
        message = codec.Decoder(messages.ClientToTokenizer)(codec.encode(message))
        self.sent.append(message)
        if isinstance(message, Abort):
            self._aborted.add(message.request_id)
        elif isinstance(message, Ping | ResetPrefixCache):
            if not self.deaf:
                loop = asyncio.get_running_loop()
                loop.call_soon(self._deliver, "detokenizer.0", message)
        elif isinstance(message, Tokenize | Detokenize):
            self._ask_tokenizer(message)
        else:
            self._num_running += 1
            task = asyncio.get_running_loop().create_task(self._serve(message, self.reject))
            self._tasks.add(task)
            task.add_done_callback(self._ended)

    def _ask_tokenizer(self, message: Tokenize | Detokenize) -> None:
        if self.deaf:
            return
        assert self.tokenizer is not None
        (answer,) = self.tokenizer.handle(f"client.{message.client}", message, 0.0)
        assert answer.to == f"client.{message.client}"
        asyncio.get_running_loop().call_soon(self._deliver, "tokenizer.0", answer.message)

    @property
    def generated(self) -> list[Generate]:
        return [message for message in self.sent if isinstance(message, Generate)]

    @property
    def aborted(self) -> list[str]:
        return [message.request_id for message in self.sent if isinstance(message, Abort)]

    @property
    def num_running(self) -> int:
        """Requests whose last terminal has not been sent."""
        return self._num_running

    async def wait_idle(self) -> None:
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def crash(self) -> None:
        """Forget everything, as a new incarnation does."""
        for task in self._tasks:
            task.cancel()
        await self.wait_idle()
        self._num_running = 0
        self._aborted.clear()

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None and self.die:
            self.die(EngineDeadError("the fake engine is broken", repr(error)))

    async def _serve(self, request: Generate, reject: ErrorInfo | None) -> None:
        await asyncio.sleep(0)
        if reject is not None:
            self._num_running -= 1
            rejected = Rejected(request.request_id, request.incarnation, reject)
            self._deliver("tokenizer.0", rejected)
            return
        prompt = request.prompt
        ids = prompt.token_ids if isinstance(prompt, TokensPrompt) else codec.pack(TEXT_IDS)
        self._deliver("tokenizer.0", Accepted(request.request_id, request.incarnation, ids))
        left = [resume.choice for resume in request.resume] or list(range(request.params.n))
        await asyncio.gather(*(self._choice(request, i, left) for i in left.copy()))

    async def _choice(self, request: Generate, choice: int, left: list[int]) -> None:
        speaker = Speaker(request, choice, self.checkpoint)
        limit = min(len(self.words), request.params.max_tokens or len(self.words))
        for resume in request.resume:
            if resume.choice == choice:
                speaker.resume(self.words[: len(resume.token_ids) // 4])
        for place, word in list(enumerate(self.words[:limit]))[speaker.num_tokens :]:
            await until(lambda at=place: self.hold != at or request.request_id in self._aborted)
            if request.request_id in self._aborted:
                break
            self._say(speaker.token(place, word))
            await asyncio.sleep(0)
        left.remove(choice)
        self._num_running -= not left
        self._say(speaker.end(self._finish(request, speaker.num_tokens)))

    def _finish(self, request: Generate, num_tokens: int) -> Finish:
        if request.request_id in self._aborted:
            reason = "abort"
        elif self.fail is not None:
            reason = "error"
        else:
            reason = "stop" if num_tokens == len(self.words) else "length"
        error = self.fail if reason == "error" else None
        cached = self.num_cached_tokens
        return Finish(reason, self.num_prompt_tokens, num_tokens, cached, error=error)

    def _say(self, chunk: Chunk | None) -> None:
        if chunk is not None:
            self._deliver("detokenizer.0", Chunks([chunk]))

    def _deliver(self, source: str, message: Any) -> None:
        assert self.deliver is not None
        self.deliver(source, message)


class Speaker:
    """Makes the chunks of one choice, rendered by the detokenizer's own renderer."""

    def __init__(self, request: Generate, choice: int, checkpoint: int) -> None:
        self.request = request
        self.choice = choice
        self.checkpoint = checkpoint
        self.num_tokens = 0
        opened = messages.OpenStream(
            stream=0,
            request_id=request.request_id,
            incarnation=request.incarnation,
            choice=choice,
            num_prompt_tokens=7,
            params=request.params,
            output=request.output,
        )
        output = request.output
        self._renderer = EventRenderer(opened) if output.form != "raw" else None
        self._parser = None
        if output.parsers is not None:
            self._parser = OutputParser(output.parsers, request.request_id, choice)
        self._words: list[str] = []
        self._rows: list[LogprobRow] = []

    def resume(self, words: list[str]) -> None:
        for place, word in enumerate(words):
            self.token(place, word)
        self._words, self._rows = [], []

    def _data(self, text: str, rows: list[LogprobRow], finish: Finish | None) -> bytes:
        if self._renderer is None:
            return b""
        if self._parser is None:
            return self._renderer.event(text, rows, finish, self.num_tokens)
        deltas = self._parser.feed(text) + (self._parser.end() if finish is not None else [])
        if not deltas and finish is None:
            return b""
        return self._renderer.events(deltas, rows, finish, self._parser.called, self.num_tokens)

    def token(self, place: int, word: str) -> Chunk | None:
        self.num_tokens += 1
        self._words.append(word)
        if (k := self.request.params.logprobs) is not None:
            ids = [100 + place, *range(k)]
            texts = [word.encode(), *(f"t{i}".encode() for i in range(k))]
            values = [-0.5, *(-1.0 - i for i in range(k))]
            self._rows.append(LogprobRow(place, 2, ids, values, texts))
        due = self.request.output.delta or len(self._words) >= self.checkpoint
        return self._chunk(None) if due else None

    def end(self, finish: Finish) -> Chunk:
        return self._chunk(finish)

    def _chunk(self, finish: Finish | None) -> Chunk:
        words, rows = self._words, self._rows
        self._words, self._rows = [], []
        first = self.num_tokens - len(words)
        text = "".join(words)
        logprobs, texts = pack_rows(rows, first) if rows else (None, [])
        prompt, prompt_texts = self._prompt_logprobs() if not first else (None, [])
        return Chunk(
            request_id=self.request.request_id,
            incarnation=self.request.incarnation,
            choice=self.choice,
            first_index=first,
            token_ids=codec.pack(np.arange(100 + first, 100 + self.num_tokens)),
            text=text,
            data=self._data(text, rows, finish),
            finish=finish,
            logprobs=logprobs,
            logprob_tokens=texts,
            prompt_logprobs=prompt,
            prompt_logprob_tokens=prompt_texts,
        )

    def _prompt_logprobs(self) -> tuple[messages.TokenLogprobs | None, list[bytes | None]]:
        """Of the prompt's second and third token, if asked for: 8 and 9."""
        k = self.request.params.prompt_logprobs
        if k is None or self.choice:
            return None, []
        ids, texts = [*range(k)], [f"t{i}".encode() for i in range(k)]
        values = [-1.0 - i for i in range(k)]
        rows = [
            LogprobRow(place, 5, [place + 7, *ids], [-4.5, *values], [b"p", *texts])
            for place in (1, 2)
        ]
        return pack_rows(rows, 0)


@pytest.fixture
def spec() -> ModelSpec:
    return ModelSpec(
        name="fake-model",
        path="/nowhere",
        tokenizer_path="/nowhere",
        architecture="Fake",
        vocab_size=1000,
        max_model_len=512,
        eos_token_ids=[2],
        hf_config={},
    )


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def client(spec: ModelSpec, engine: FakeEngine) -> EngineClient:
    client = EngineClient(spec, engine.send, max_num_queued_reqs=200)
    engine.deliver = client.deliver
    engine.die = client.fail_all
    return client


@pytest.fixture
def tokenizer(engine: FakeEngine, spec: ModelSpec, tmp_path: Path) -> TokenizerCore:
    """A real one of single bytes, <s> (256) and </s> (257), that answers in the fake engine."""
    folder = str(make_tiny_model(tmp_path / "tiny"))
    engine.tokenizer = TokenizerCore(spec, load_tokenizer(folder))
    return engine.tokenizer


class FakeConnection:
    """EngineConnection's API, with a FakeEngine behind it."""

    def __init__(self, engine: FakeEngine) -> None:
        self.engine = engine
        self.details: dict[str, str | int | float] = {"dtype": "fake"}
        self.send = engine.send
        self.launched: list[EngineConfig] = []
        self.num_closed = 0
        self.refusal: Exception | None = None

    async def launch(
        self,
        config: EngineConfig,
        spec: ModelSpec,
        on_progress: Callable[[str, supervision.Progress], None] | None = None,
    ) -> FakeConnection:
        self.launched.append(config)
        if self.refusal is not None:
            raise self.refusal
        assert on_progress is not None
        on_progress("worker.0", supervision.Progress("loading", 1, 2))
        return self

    def attach(
        self,
        deliver: Callable[[str, Any], None],
        on_death: Callable[[EngineDeadError], None],
        on_lost: Callable[[supervision.PeersLost], None],
        on_back: Callable[[list[str]], None],
    ) -> None:
        self.engine.deliver, self.engine.die = deliver, on_death
        self.on_lost, self.on_back = on_lost, on_back

    async def close(self, timeout: float) -> None:
        self.num_closed += 1
        self.engine.hold = None
        await self.engine.wait_idle()


@pytest.fixture
def connection(
    monkeypatch: pytest.MonkeyPatch, engine: FakeEngine, spec: ModelSpec
) -> FakeConnection:
    """What LLM and AsyncLLM get instead of an engine in processes of its own."""
    fake = FakeConnection(engine)

    def resolve(config: EngineConfig, on_progress: Callable[[str, int, int], None]) -> ModelSpec:
        on_progress("converting", 1, 2)
        return msgspec.structs.replace(spec, name=config.model)

    monkeypatch.setattr("ringcast.frontend.async_llm.EngineConnection", fake)
    monkeypatch.setattr("ringcast.frontend.async_llm.resolve_model", resolve)
    return fake


@pytest.fixture
def url(serve: Any) -> Iterator[str]:
    """The address of a server that runs beside the test, on a loop and thread of its own."""
    thread = LoopThread()
    serving = serve()
    server = thread.run(serving.__aenter__())
    yield server.url
    thread.run(serving.__aexit__(None, None, None))
    thread.stop()


@dataclasses.dataclass
class Server:
    url: str
    port: int
    http: aiohttp.ClientSession


@pytest.fixture
def serve(spec: ModelSpec, client: EngineClient, engine: FakeEngine) -> Any:
    """serve(**ServerConfig's options): the application on a real socket, as its actor runs it."""

    async def status() -> supervision.Status:
        actor = supervision.ActorStatus("worker.0", 17, "ready", 1.5, 2**20, 0)
        edge = supervision.EdgeStatus("client.0>tokenizer.0", 1000, 10, 5)
        return supervision.Status([actor], [edge], {"num_running": 2.0})

    @contextlib.asynccontextmanager
    async def serving(**options: Any) -> AsyncIterator[Server]:
        config = build(ServerConfig, options)
        client.observer = recorder = Recorder()
        scale = ScaleAsks(lambda message: None).ask  # which nobody answers
        app = make_app(client, spec, config, status, recorder, scale=scale)
        server = HttpServer(app, config)
        listener = bind("127.0.0.1", 0)
        url, port = await server.open(listener), listener.getsockname()[1]
        try:
            async with aiohttp.ClientSession(url) as http:
                yield Server(url, port, http)
            await client.wait_idle()
            await engine.wait_idle()
        finally:
            await server.close()

    return serving
