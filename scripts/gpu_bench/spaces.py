"""What is tried where there is something in use: what is near to it, and then to the best.

Near are configurations whose numbers must be doubled or halved a few times to come from one to the
other. What can't fit the device isn't among a case's candidates.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import log2
from typing import Any, NamedTuple, Protocol

from ringcast.kernels.gpu.architecture import Architecture

FARTHEST = 2  # from the best that is varied: doublings, and numbers that differ


class Limits(NamedTuple):
    """Of a device. shared: bytes that a multiprocessor's programs may have, which one may have
    alone.
    """

    architecture: Architecture
    multiprocessors: int
    shared: int
    registers: int  # of a multiprocessor


class Case(Protocol):
    def in_use(self, limits: Limits) -> Any:
        """What the engine takes."""

    def candidates(self, limits: Limits) -> Iterator[Any]:
        """All that fit the device, without those that are no use."""

    def shared_bytes(self, config: Any, limits: Limits) -> int:
        """Of the shared memory that a multiprocessor has."""


def first_round(case: Case, limits: Limits, most: int) -> list[Any]:
    """What is in use, and so many more, the nearest first."""
    in_use = case.in_use(limits)
    others = (config for config in case.candidates(limits) if config != in_use)
    return [in_use, *sorted(others, key=lambda config: distance(config, in_use))[:most]]


def second_round(case: Case, limits: Limits, best: list[Any]) -> list[Any]:
    """Those that are near to one of the best."""
    candidates, found = list(case.candidates(limits)), {}
    for config in best:
        near = [c for c in candidates if c != config and distance(c, config) <= FARTHEST]
        few = [c for c in near if sum(a != b for a, b in zip(c, config, strict=True)) <= FARTHEST]
        found |= dict.fromkeys(sorted(few, key=lambda each: distance(each, config)))
    return list(found)


def distance(one: Iterable[int], other: Iterable[int]) -> float:
    """Doublings; what is on or off is one away from the other."""
    return sum(abs(log2(a / b)) if a and b else a != b for a, b in zip(one, other, strict=True))
