"""Writes what was tuned into the tables of kernels/gpu."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any


def replace_tuned(path: Path, tuned: dict[Any, Any]) -> None:
    """In place of the TUNED that the file at `path` has. Raises ValueError where it has none."""
    before, start, rest = path.read_text().partition("\nTUNED: ")
    head, _, old = rest.partition("\n")
    if not start or not head.endswith(" = {") or "\n}\n" not in old:
        raise ValueError(f"{path} has no TUNED that could be replaced")
    after = old.partition("\n}\n")[2]
    path.write_text("\n".join([f"{before}{start}{head}", *_lines(tuned, 4), "}", after]))


def _lines(table: dict[Any, Any], indent: int) -> Iterator[str]:
    for key, value in table.items():
        line = f"{' ' * indent}{key}: "
        if isinstance(value, dict):
            yield line + "{"
            yield from _lines(value, indent + 4)
            yield " " * indent + "},"
        else:
            yield f"{line}{_written(value)},"


def _written(value: Any) -> str:
    """A Config by its name, without what are defaults at its end."""
    if not hasattr(value, "_field_defaults"):
        return repr(value)
    fields, defaults = list(value), value._field_defaults
    for name in reversed(value._fields):
        if name not in defaults or fields[-1] != defaults[name]:
            break
        fields.pop()
    return f"{type(value).__name__}({', '.join(map(repr, fields))})"
