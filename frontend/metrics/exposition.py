"""/metrics: the names that vLLM's dashboards know, with `ringcast:` before them.

What the engine counts comes from the supervisor's Status, which has what every actor publishes once
a second; what befalls requests comes from the Records of all API servers. A number that is not
known (of an actor that is being restarted) is absent for the time, and its counters begin again at
0; those of requests go on. What a scheduler counts has the label `engine`, its replica's number.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from ...mq.supervision import Status
from .engine_totals import EngineTotals
from .histogram import Histogram
from .records import Records

PREFIX = "ringcast:"
ENGINE_LABELS = ["model_name", "engine"]

GAUGES = {
    "num_requests_running": ("running", "Choices in the batch."),
    "num_requests_waiting": ("waiting", "Choices that wait to enter it."),
}
COUNTERS = {
    "num_preemptions": ("preemptions", "Choices put back into the queue for want of KV blocks."),
    "prompt_tokens": ("prompt_tokens", "Prompt tokens of requests that have entered the batch."),
    "generation_tokens": ("generation_tokens", "Tokens sampled for choices that were open."),
    "prefix_cache_queries": ("prefix_cache_queries", "Prompt tokens looked up in the cache."),
    "prefix_cache_hits": ("prefix_cache_hits", "Prompt tokens found there."),
}
EXPERTS = {
    "expert_balancedness": (GaugeMetricFamily, "Mean load of the ranks by the most, 0 to 1."),
    "expert_skew": (GaugeMetricFamily, "Most tokens of an expert by the mean, of all layers."),
    "expert_tokens": (CounterMetricFamily, "Tokens, once for each expert that they went to."),
    "eplb_rounds": (CounterMetricFamily, "How often experts were placed anew."),
    "eplb_moved_experts": (CounterMetricFamily, "Experts that came to a rank by that."),
    "eplb_seconds": (CounterMetricFamily, "Time that steps have waited for that."),
}
"""Name here: the scheduler's statistic, and the line of help. EXPERTS, whose statistics have these
names, are exported of mixtures alone.
"""


def render(status: Status, records: Records, model: str, accept: str | None) -> tuple[bytes, str]:
    """The text of a scrape, and its content type, as the scraper's Accept header wants it."""
    encode, content_type = choose_encoder(accept or "")
    return encode(_Scrape(status, records, model)), content_type


class _Scrape(Collector):
    """What prometheus_client takes for a registry."""

    def __init__(self, status: Status, records: Records, model: str) -> None:
        self._status = status
        self._records = records
        self._model = model

    def collect(self) -> Iterator[Metric]:
        yield from self._engine(EngineTotals(self._status))
        yield from self._requests(self._records)
        yield from self._actors(self._status)

    def _engine(self, engine: EngineTotals) -> Iterator[Metric]:
        for name, (statistic, words) in GAUGES.items():
            yield self._of_engines(GaugeMetricFamily, name, words, engine.of(statistic))
        words = "Share of the KV blocks in use, 0 to 1."
        usage = engine.of("kv_usage")
        yield self._of_engines(GaugeMetricFamily, "kv_cache_usage_perc", words, usage)
        for name, (statistic, words) in COUNTERS.items():
            yield self._of_engines(CounterMetricFamily, name, words, engine.of(statistic))
        for name, (kind, words) in EXPERTS.items():
            if values := engine.of(name):
                yield self._of_engines(kind, name, words, values)
        sizes = HistogramMetricFamily(
            PREFIX + "iteration_tokens_total", "Tokens computed in a step.", labels=ENGINE_LABELS
        )
        for number in engine.engines:
            steps = engine.step_sizes(number)
            if steps is not None:
                sizes.add_metric([self._model, number], *steps)
        yield sizes

    def _requests(self, records: Records) -> Iterator[Metric]:
        finished = CounterMetricFamily(
            PREFIX + "request_success",
            "Choices that have ended, by reason.",
            labels=["model_name", "finished_reason"],
        )
        for reason, count in records.finished.items():
            finished.add_metric([self._model, reason], count)
        yield finished
        for name, histogram, words in _histograms(records):
            yield self._histogram(name, words, *histogram.cumulative())

    def _actors(self, status: Status) -> Iterator[Metric]:
        labels = ["model_name", "actor"]
        cpu = CounterMetricFamily(
            PREFIX + "actor_cpu_seconds", "CPU time of an actor's process.", labels=labels
        )
        memory = GaugeMetricFamily(
            PREFIX + "actor_resident_memory_bytes", "Its resident memory.", labels=labels
        )
        restarts = CounterMetricFamily(
            PREFIX + "actor_restarts", "How often it was started again.", labels=labels
        )
        for actor in status.actors:
            restarts.add_metric([self._model, actor.name], actor.restarts)
            if actor.state != "dead":
                cpu.add_metric([self._model, actor.name], actor.cpu_seconds)
                memory.add_metric([self._model, actor.name], actor.rss_bytes)
        replicas = GaugeMetricFamily(
            PREFIX + "replicas", "Replicas that requests go to.", labels=["model_name"]
        )
        if (number := status.statistics.get("supervisor.replicas")) is not None:
            replicas.add_metric([self._model], number)
        fill = GaugeMetricFamily(
            PREFIX + "channel_fill",
            "Share of a channel's room in use, 0 to 1.",
            labels=["model_name", "channel"],
        )
        for edge in status.edges:
            fill.add_metric([self._model, edge.name], edge.used / max(edge.capacity, 1))
        yield from (cpu, memory, restarts, replicas, fill)

    def _of_engines(
        self,
        kind: type[GaugeMetricFamily | CounterMetricFamily],
        name: str,
        words: str,
        values: dict[str, float],
    ) -> Metric:
        family = kind(PREFIX + name, words, labels=ENGINE_LABELS)
        for engine, value in values.items():
            family.add_metric([self._model, engine], value)
        return family

    def _histogram(
        self, name: str, words: str, buckets: list[tuple[str, float]], total: float
    ) -> Metric:
        family = HistogramMetricFamily(PREFIX + name, words, labels=["model_name"])
        family.add_metric([self._model], buckets, total)
        return family


def _histograms(records: Records) -> Iterable[tuple[str, Histogram, str]]:
    gaps = records.between_tokens
    return (
        ("time_to_first_token_seconds", records.first_token, "From a request to its first token."),
        ("inter_token_latency_seconds", gaps, "Between the chunks of a stream."),
        ("time_per_output_token_seconds", gaps, "inter_token_latency_seconds' older name."),
        (
            "request_time_per_output_token_seconds",
            records.per_token,
            "The mean time of a choice's tokens after its first.",
        ),
        ("e2e_request_latency_seconds", records.end_to_end, "From a request to its end."),
        ("request_queue_time_seconds", records.queue, "From the scheduler's queue to the batch."),
        ("request_prefill_time_seconds", records.prefill, "From there to the first token."),
        ("request_decode_time_seconds", records.decode, "From there to the last."),
        ("request_inference_time_seconds", records.inference, "Prefill and decode."),
        ("request_prompt_tokens", records.prompt_tokens, "Tokens of a request's prompt."),
        ("request_generation_tokens", records.generation_tokens, "Tokens of a choice's output."),
        ("request_params_n", records.n, "Choices that a request asked for."),
        ("request_params_max_tokens", records.max_tokens, "Tokens that it asked for at most."),
    )
