"""What the schedulers have published of themselves, from a Status, for all of them together."""

from __future__ import annotations

from ...mq.supervision import Status

_STEPS = "steps_le_"


class EngineTotals:
    def __init__(self, status: Status) -> None:
        self._values: dict[str, list[float]] = {}
        for key, value in status.statistics.items():
            actor, _, name = key.rpartition(".")
            if actor.startswith("scheduler."):
                self._values.setdefault(name, []).append(value)

    def total(self, name: str) -> float | None:
        """None while no scheduler has published it."""
        values = self._values.get(name)
        return sum(values) if values else None

    def mean(self, name: str) -> float | None:
        values = self._values.get(name)
        return sum(values) / len(values) if values else None

    def step_sizes(self) -> tuple[list[tuple[str, float]], float] | None:
        """((most tokens, steps of at most so many), ...), and the tokens of all steps."""
        tokens = self.total("scheduled_tokens")
        if tokens is None:
            return None
        buckets, steps = [], 0.0
        for name, counts in self._values.items():  # published in ascending order
            if name.startswith(_STEPS):
                steps += sum(counts)
                end = name.removeprefix(_STEPS)
                buckets.append(("+Inf" if end == "inf" else str(float(end)), steps))
        return buckets, tokens
