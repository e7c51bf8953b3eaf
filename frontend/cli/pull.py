"""`ringcast pull`: fetch a model and convert it, so that serving it starts at once."""

from __future__ import annotations

import argparse

from ...mq.config import DEFAULT_MODEL
from ..hub import pull_model
from .progress import StartProgress


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "name",
        metavar="NAME",
        nargs="?",
        default=DEFAULT_MODEL,
        help="a name from `ringcast models`, a hub id, or a .gguf file to convert "
        f"(default: {DEFAULT_MODEL})",
    )
    parser.add_argument("--revision", help="branch, tag or commit of a hub id")


def run(args: argparse.Namespace) -> int:
    with StartProgress() as progress:
        folder = pull_model(args.name, args.revision, progress.on_model)
    print(f"{args.name}: {folder}")
    return 0
