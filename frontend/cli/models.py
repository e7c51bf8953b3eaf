"""`ringcast models`: the models known by name, and which of them are here."""

from __future__ import annotations

import argparse
import sys

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..hub import ModelInfo, list_models

_HEADINGS = ("name", "parameters", "size", "download", "license", "where")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON, with every number whole")


def run(args: argparse.Namespace) -> int:
    models = list_models()
    if args.json:
        print(msgspec.json.format(msgspec.json.encode(models)).decode())
    elif sys.stdout.isatty():
        _print_table(models)
    else:
        print("\n".join("\t".join(row) for row in [_HEADINGS, *map(_row, models)]))
    return 0


def _print_table(models: list[ModelInfo]) -> None:
    table = Table(box=None, header_style="bold")
    for heading in _HEADINGS:
        table.add_column(heading, overflow="fold", no_wrap=heading == "name")
    for model in models:
        table.add_row(*map(Text, _row(model)), style=None if model.pulled else "dim")
    Console().print(table)


def _row(model: ModelInfo) -> tuple[str, ...]:
    return (
        model.name,
        f"{model.num_parameters / 1e6:.0f}M",
        f"{model.size_bytes / 1e6:.0f} MB",
        f"{model.download_bytes / 1e6:.0f} MB",
        model.license,
        model.path if model.pulled else "not pulled",
    )
