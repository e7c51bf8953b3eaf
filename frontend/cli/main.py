"""`ringcast`: finds the command, runs it, and turns exceptions into one line and an exit status.

    0    done
    1    something failed that the user didn't cause
    2    the user's mistake: options, a model that can't be served, an impossible request
    130  Ctrl-C

RINGCAST_DEBUG=1 shows tracebacks as well.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import traceback
from collections.abc import Sequence

from ... import __version__
from ...mq.errors import ConfigError, InvalidRequestError, RingcastError

COMMANDS = {
    "serve": ("ringcast.frontend.cli.serve", "serve a model over HTTP, as OpenAI's API does"),
    "chat": ("ringcast.frontend.cli.chat", "talk to a model in the terminal"),
    "generate": ("ringcast.frontend.cli.generate", "complete prompts and print the texts"),
    "batch": ("ringcast.frontend.cli.batch", "answer a file of requests in OpenAI's batch format"),
    "pull": ("ringcast.frontend.cli.pull", "fetch a model and convert it, ready to serve"),
    "models": ("ringcast.frontend.cli.models", "list the models known by name"),
    "top": ("ringcast.frontend.cli.top", "watch the actors of a running server"),
    "scale": ("ringcast.frontend.cli.scale", "change the number of a running server's replicas"),
    "topology": ("ringcast.frontend.cli.topology", "draw the actors and who talks to whom"),
}
"""Each command's module, with `add_arguments(parser)` and `run(args) -> int`; its line of help."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (sys.argv by default) and return the exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        return _run(words)
    except KeyboardInterrupt:
        return 130
    except SystemExit as end:  # argparse has said what is wrong
        return end.code if isinstance(end.code, int) else 0
    except BrokenPipeError:  # `ringcast models | head -1`: nobody reads on
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except RingcastError as error:
        if os.environ.get("RINGCAST_DEBUG") == "1":
            traceback.print_exc()
        print(f"ringcast: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError | InvalidRequestError) else 1


def _run(words: list[str]) -> int:
    if not words or words[0] not in COMMANDS:
        make_overview().parse_args(
            words
        )  # prints help or version, or says what is wrong, and exits
        raise AssertionError("the overview accepts no command line")
    module = importlib.import_module(COMMANDS[words[0]][0])
    parser = make_parser(words[0])
    module.add_arguments(parser)
    # Intermixed, because an optional MODEL after options is not understood otherwise before 3.13.
    status: int = module.run(parser.parse_intermixed_args(words[1:]))
    sys.stdout.flush()
    return status


def make_overview() -> argparse.ArgumentParser:
    """The parser of a command line without a known command: it knows --help and --version."""
    parser = argparse.ArgumentParser(
        prog="ringcast",
        usage="ringcast COMMAND ...",
        description="Serve and run language models on this machine.",
        epilog="`ringcast COMMAND --help` tells a command's options.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"ringcast {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, (_, line) in COMMANDS.items():
        commands.add_parser(name, help=line)
    return parser


def make_parser(command: str) -> argparse.ArgumentParser:
    """The still empty parser of one command."""
    line = COMMANDS[command][1]
    return argparse.ArgumentParser(
        prog=f"ringcast {command}",
        description=f"{line[0].upper()}{line[1:]}.",
        allow_abbrev=False,
    )


if __name__ == "__main__":
    sys.exit(main())
