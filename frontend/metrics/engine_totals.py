"""What the schedulers have published of themselves, from a Status: of each replica, and of all."""

from __future__ import annotations

from ...mq.supervision import Status

_STEPS = "steps_le_"


class EngineTotals:
    """engines: the replicas that have published something, by number ("0"), in order."""

    def __init__(self, status: Status) -> None:
        values: dict[str, dict[str, float]] = {}
        for key, value in status.statistics.items():
            actor, _, name = key.rpartition(".")
            kind, _, number = actor.partition(".")
            if kind == "scheduler":
                values.setdefault(number, {})[name] = value
        self.engines = sorted(values, key=int)
        self._values = values

    def of(self, name: str) -> dict[str, float]:
        """By replica, of those that have published it."""
        values = self._values
        return {number: values[number][name] for number in self.engines if name in values[number]}

    def total(self, name: str) -> float | None:
        """None while no scheduler has published it."""
        values = self.of(name).values()
        return sum(values) if values else None

    def mean(self, name: str) -> float | None:
        values = self.of(name).values()
        return sum(values) / len(values) if values else None

    def step_sizes(self, engine: str) -> tuple[list[tuple[str, float]], float] | None:
        """((most tokens, steps of at most so many), ...), and the tokens of all steps."""
        values = self._values[engine]
        if "scheduled_tokens" not in values:
            return None
        buckets, steps = [], 0.0
        for name, count in values.items():  # published in ascending order
            if name.startswith(_STEPS):
                steps += count
                end = name.removeprefix(_STEPS)
                buckets.append(("+Inf" if end == "inf" else str(float(end)), steps))
        return buckets, values["scheduled_tokens"]
