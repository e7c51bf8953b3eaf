"""The line that says how much the engine has done since the last one."""

from __future__ import annotations

from ...mq.supervision import Status
from .engine_totals import EngineTotals

INTERVAL_SECONDS = 10.0


class Throughput:
    """Compares each Status with the one before. No clock of its own."""

    def __init__(self) -> None:
        self._last: dict[str, float] = {}
        self._last_time = 0.0

    def line(self, status: Status, now: float) -> str | None:
        """None where there was no work, and of the first status."""
        engine = EngineTotals(status)
        last, seconds = self._last, now - self._last_time
        self._last, self._last_time = _counters(engine), now
        if not last:
            return None
        done = {name: _growth(value, last[name]) for name, value in self._last.items()}
        running, waiting = engine.total("running") or 0.0, engine.total("waiting") or 0.0
        if not (running or waiting or done["prompt_tokens"] or done["generation_tokens"]):
            return None
        words = (
            f"prompt {done['prompt_tokens'] / seconds:.1f} tok/s, "
            f"generation {done['generation_tokens'] / seconds:.1f} tok/s, "
            f"running {running:.0f}, waiting {waiting:.0f}, "
            f"KV cache {engine.mean('kv_usage') or 0.0:.1%}"
        )
        if queries := done["prefix_cache_queries"]:
            words += f", prefix cache hits {done['prefix_cache_hits'] / queries:.1%}"
        return words


_COUNTERS = ("prompt_tokens", "generation_tokens", "prefix_cache_queries", "prefix_cache_hits")


def _counters(engine: EngineTotals) -> dict[str, float]:
    return {name: engine.total(name) or 0.0 for name in _COUNTERS}


def _growth(now: float, before: float) -> float:
    """A scheduler that was started again counts from 0."""
    return now - before if now >= before else now
