"""The sampling options of `ringcast generate` and `ringcast chat`."""

from __future__ import annotations

import argparse
from typing import Any

# Field of SamplingParams, its option, type and help. (--seed is the engine's.)
_OPTIONS: tuple[tuple[str, str, type, str], ...] = (
    ("max_tokens", "--max-tokens", int, "most tokens to generate"),
    ("temperature", "--temperature", float, "0 is greedy (default: the model's, else 1)"),
    ("top_p", "--top-p", float, "smallest set of tokens with this probability"),
    ("top_k", "--top-k", int, "only the so many likeliest tokens"),
    ("min_p", "--min-p", float, "no token less likely than this share of the likeliest"),
    ("seed", "--sampling-seed", int, "draw the same numbers each time"),
)


def add_sampling_options(parser: argparse.ArgumentParser, default_max_tokens: str) -> None:
    group = parser.add_argument_group("sampling options")
    for field, option, kind, line in _OPTIONS:
        metavar = "N" if kind is int else "X"
        if field == "max_tokens":
            line = f"{line} (default: {default_max_tokens})"
        group.add_argument(option, dest=f"sampling_{field}", type=kind, metavar=metavar, help=line)
    group.add_argument(
        "--stop",
        dest="sampling_stop",
        action="append",
        metavar="TEXT",
        help="end the output before this text; may be given several times",
    )


def read_sampling(args: argparse.Namespace) -> dict[str, Any]:
    """The sampling fields that the command line sets."""
    named = {
        name.removeprefix("sampling_"): value
        for name, value in vars(args).items()
        if name.startswith("sampling_")
    }
    return {name: value for name, value in named.items() if value is not None}
