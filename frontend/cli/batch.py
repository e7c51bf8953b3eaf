"""`ringcast batch`: answer a file of requests in OpenAI's batch format, and go on where it stopped.

Exit status: 0 at the end of the input, whatever single lines came to; 1 if not one of its lines
was answered, or the run could not go on.
"""

from __future__ import annotations

import argparse
import contextlib
from typing import Any

import msgspec

from ...actors.reporter import say
from ...mq.config import EngineConfig, build
from ...mq.errors import ConfigError
from ...mq.server_config import ServerConfig
from ..async_llm import AsyncLLM
from ..batch.answerer import Answerer
from ..batch.engine_answerer import EngineAnswerer
from ..batch.input_file import InputFile
from ..batch.output_file import OutputFile
from ..batch.progress import BatchProgress
from ..batch.run import Tally, run_batch
from ..batch.server_answerer import ServerAnswerer
from ..loop_thread import LoopThread
from .options import add_options, read_options
from .progress import StartProgress

_SERVER_OPTIONS = (
    "served_model_name",
    "enable_auto_tool_choice",
    "tool_call_parser",
    "reasoning_parser",
)
"""Those options of a server that say how requests are answered."""


def _default(field: msgspec.structs.FieldInfo) -> Any:
    if field.default_factory is msgspec.NODEFAULT:
        return field.default
    return msgspec.field(default_factory=field.default_factory)


_Serving = msgspec.defstruct(
    "server",
    [
        (field.name, field.type, _default(field))
        for field in msgspec.structs.fields(ServerConfig)
        if field.name in _SERVER_OPTIONS
    ],
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "input", metavar="IN", nargs="?", help="a file of requests, one a line; - is stdin"
    )
    parser.add_argument(
        "output",
        metavar="OUT",
        nargs="?",
        help="the file to append answers to, as they come; what is in it isn't asked again; "
        "- is stdout",
    )
    parser.add_argument("-i", "--input-file", metavar="IN", help="IN by name, as vLLM has it")
    parser.add_argument("-o", "--output-file", metavar="OUT", help="likewise OUT")
    parser.add_argument("--url", help="ask the server there instead of starting an engine")
    parser.add_argument(
        "--overwrite", action="store_true", help="lose what is in OUT and answer everything"
    )
    parser.add_argument(
        "--max-in-flight",
        type=int,
        metavar="N",
        help="requests under way at a time (default: twice max_num_seqs)",
    )
    add_options(parser, EngineConfig)
    add_options(parser, _Serving)
    parser.usage = "%(prog)s IN OUT [MODEL] [options]"


def run(args: argparse.Namespace) -> int:
    _sort_words(args)
    config = read_options(args, EngineConfig)
    server = build(ServerConfig, msgspec.structs.asdict(read_options(args, _Serving)))
    if args.url is not None:
        _refuse_engine_options(args)
    limit = _limit(args, config)
    tally = Tally()
    with contextlib.ExitStack() as stack:
        progress = stack.enter_context(StartProgress())
        source = stack.enter_context(_read_input(args, progress))
        output = stack.enter_context(OutputFile(args.output, args.overwrite))
        for outcome in output.resume(source.settle):
            tally.add_earlier(outcome)
        if source.num_settled < source.num_lines:
            answerer = _make_answerer(args, config, server, limit, progress)
            _answer_all(source, output, answerer, limit, tally, progress)
        else:
            say(f"nothing to do: {output.name} has all {source.num_lines:,} answers")
    return 0 if tally.any_answered else 1


def _sort_words(args: argparse.Namespace) -> None:
    """Words are IN, OUT and MODEL, without those that options name."""
    places = (args.input, args.output, args.model_argument)
    words = [word for word in places if word is not None]
    for place, named in (("input", args.input_file), ("output", args.output_file)):
        if named is None and not words:
            raise ConfigError(f"no {place} file: say `ringcast batch IN OUT [MODEL]`")
        setattr(args, place, words.pop(0) if named is None else named)
    args.model_argument = words.pop(0) if words else None
    if words:
        raise ConfigError(f"{words[0]!r} is one word too many")


def _read_input(args: argparse.Namespace, progress: StartProgress) -> InputFile:
    source = InputFile(args.input)
    try:
        if args.output != "-" and source.is_same_as(args.output):
            raise ConfigError(f"{args.output} is the input; answers need a file of their own")
        source.survey(lambda done: progress.update("batch", "reading", done, source.size))
    except BaseException:
        source.close()
        raise
    return source


def _make_answerer(
    args: argparse.Namespace,
    config: EngineConfig,
    server: ServerConfig,
    limit: int,
    progress: StartProgress,
) -> Answerer:
    if args.url is not None:
        return ServerAnswerer(args.url, limit)
    engine = AsyncLLM(on_progress=progress.update, **msgspec.structs.asdict(config))
    engine.resolve()
    return EngineAnswerer(engine, server)


def _answer_all(
    source: InputFile,
    output: OutputFile,
    answerer: Answerer,
    limit: int,
    tally: Tally,
    start: StartProgress,
) -> None:
    async def work() -> None:
        async with answerer:
            start.stop()
            progress = BatchProgress(tally, source.num_lines)
            try:
                with progress:
                    lines = source.unsettled()
                    await run_batch(lines, answerer, output, limit, tally, progress.update)
            finally:
                say(progress.summary())

    thread = LoopThread()
    try:
        thread.run(work())
    except KeyboardInterrupt:
        say(_how_to_go_on(output))
        raise
    finally:
        thread.stop()


def _how_to_go_on(output: OutputFile) -> str:
    if not output.resumable:
        return "stopped"
    return f"stopped; the same command without --overwrite goes on with {output.name}"


def _limit(args: argparse.Namespace, config: EngineConfig) -> int:
    given: int | None = args.max_in_flight
    if given is not None and given < 1:
        raise ConfigError(f"max_in_flight = {given}: must be at least 1")
    limit = given or 2 * config.max_num_seqs
    return limit if args.url is not None else min(limit, config.max_num_queued_reqs)


def _refuse_engine_options(args: argparse.Namespace) -> None:
    fields = (*EngineConfig.__struct_fields__, *_SERVER_OPTIONS)
    for name in ("config_file", "model_argument", *fields):
        if getattr(args, name, None) is not None:
            option = name.removesuffix("_file").removesuffix("_argument").replace("_", "-")
            raise ConfigError(f"--{option} says how to start an engine; --url has one running")
