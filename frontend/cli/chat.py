"""`ringcast chat`: talk to a model, in an engine of its own or on a running server."""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Callable, Generator, Iterator
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
from rich.console import Console

from ...mq.config import EngineConfig
from ...mq.errors import ConfigError, InvalidRequestError, OverloadedError, RequestFailedError
from ...mq.sampling_params import SamplingParams
from ..loop_thread import LoopThread
from .conversation import Conversation, Message
from .options import add_options, read_options
from .remote import RemoteServer
from .sampling import add_sampling_options, read_sampling

if TYPE_CHECKING:
    from ..llm import LLM

_WELCOME = "/help lists the commands, Ctrl-C stops an answer, Ctrl-D ends"


Pieces = Generator[str, None, None]


class Speaker(Protocol):
    """Whoever answers. `num_tokens` is the length of the last answer that came to its end."""

    name: str
    num_tokens: int

    def answer(self, messages: list[Message], sampling: dict[str, Any]) -> Pieces:
        """The pieces of an answer. Raises what `LLM.chat` does."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", help="talk to the server there instead of starting an engine")
    parser.add_argument("--system", metavar="TEXT", help="the system message")
    add_sampling_options(parser, "up to the context length")
    add_options(parser, EngineConfig)


def run(args: argparse.Namespace) -> int:
    config = read_options(args, EngineConfig)
    if args.url is not None:
        _refuse_engine_options(args)
    sampling = read_sampling(args)
    SamplingParams(**{"max_tokens": None, **sampling})  # says what is wrong before anything starts
    conversation = Conversation(args.system, sampling)
    with contextlib.ExitStack() as stack:
        speaker: Speaker
        if args.url is None:
            speaker = stack.enter_context(_local(config))
        else:
            model = getattr(args, "model_argument", None) or getattr(args, "model", None)
            speaker = stack.enter_context(_remote(args.url, model))
        terminal = sys.stdin.isatty()
        console = Console(highlight=False, soft_wrap=True)
        if terminal:
            _enable_line_editing()
            console.print(speaker.name, style="bold", markup=False)
            console.print(_WELCOME, style="dim")
        talk(conversation, speaker, console, _ask if terminal else _read_line, terminal)
    return 0


def talk(
    conversation: Conversation,
    speaker: Speaker,
    console: Console,
    read: Callable[[], str],
    terminal: bool,
) -> None:
    """Until /quit or the end of input: read a line, act on it or have it answered."""
    while not conversation.ended:
        try:
            line = read()
        except EOFError:
            if terminal:
                console.print()  # leave the prompt's line
            return
        except KeyboardInterrupt:
            console.print("\n[dim]Ctrl-D or /quit ends[/]")
            continue
        if conversation.is_command(line):
            console.print(conversation.command(line), style="dim", markup=False)
        elif line.strip():
            _answer(conversation, speaker, console, line, terminal)


def _answer(
    conversation: Conversation, speaker: Speaker, console: Console, line: str, terminal: bool
) -> None:
    pieces: list[str] = []
    start = time.monotonic()
    stopped = False
    try:
        messages = conversation.asking(line)
        with contextlib.closing(speaker.answer(messages, conversation.sampling)) as said:
            for piece in said:
                pieces.append(piece)
                console.out(piece, end="", highlight=False)
                console.file.flush()
    except KeyboardInterrupt:
        stopped = True
    except (InvalidRequestError, OverloadedError, RequestFailedError) as error:
        # What can't be answered is not said: the conversation stays as it was.
        if not terminal:
            raise
        console.print(f"[red]{type(error).__name__}[/]", end=": ")
        console.print(str(error), markup=False)
        return
    console.out("")
    conversation.heard(line, "".join(pieces))
    if terminal:
        console.print(_summary(speaker, start, stopped))


def _summary(speaker: Speaker, start: float, stopped: bool) -> str:
    if stopped:
        return "[dim](stopped)[/]"
    seconds = max(time.monotonic() - start, 1e-9)
    return f"[dim]({speaker.num_tokens} tokens, {speaker.num_tokens / seconds:.0f} tok/s)[/]"


class LocalSpeaker:
    """A model in an engine of this process's own."""

    def __init__(self, llm: LLM, name: str) -> None:
        self.name = name
        self.num_tokens = 0
        self._llm = llm
        defaults = llm.get_default_sampling_params()
        self._defaults = {**msgspec.structs.asdict(defaults), "max_tokens": None}

    def answer(self, messages: list[Message], sampling: dict[str, Any]) -> Pieces:
        length = 0
        params = SamplingParams(**{**self._defaults, **sampling})
        with contextlib.closing(self._llm.stream_chat(messages, params)) as outputs:
            for output in outputs:
                choice = output.outputs[0]
                yield choice.text[length:]
                length = len(choice.text)
                self.num_tokens = len(choice.token_ids)


class RemoteSpeaker:
    """The model of a running server."""

    def __init__(self, server: RemoteServer, thread: LoopThread, name: str) -> None:
        self.name = name
        self.num_tokens = 0
        self._server = server
        self._thread = thread

    def answer(self, messages: list[Message], sampling: dict[str, Any]) -> Pieces:
        answer = self._server.chat(self.name, messages, sampling)
        with contextlib.closing(self._thread.iterate(answer)) as events:
            for event in events:
                for choice in event["choices"]:
                    yield choice["delta"].get("content") or ""
                if usage := event.get("usage"):
                    self.num_tokens = usage["completion_tokens"]


@contextlib.contextmanager
def _local(config: EngineConfig) -> Iterator[LocalSpeaker]:
    from ..llm import LLM  # not needed with --url

    with LLM(**msgspec.structs.asdict(config)) as llm:
        yield LocalSpeaker(llm, config.model)


@contextlib.contextmanager
def _remote(url: str, model: str | None) -> Iterator[RemoteSpeaker]:
    thread = LoopThread()
    server = RemoteServer(url)
    try:
        yield RemoteSpeaker(server, thread, model or thread.run(server.model()))
    finally:
        thread.run(server.close())
        thread.stop()


def _refuse_engine_options(args: argparse.Namespace) -> None:
    options = ("config_file", *EngineConfig.__struct_fields__)
    for name in options:
        if name != "model" and getattr(args, name, None) is not None:
            option = name.removesuffix("_file").replace("_", "-")
            raise ConfigError(f"--{option} says how to start an engine; --url has one running")


def _ask() -> str:
    return input("> ")


def _read_line() -> str:
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line.rstrip("\n")


def _enable_line_editing() -> None:
    with contextlib.suppress(ImportError):  # not every Python is built with it
        import readline  # noqa: F401
