"""What a real server, with the fake device, says of itself: /metrics, the dashboard, its log."""

from __future__ import annotations

import json
import re
import subprocess
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.core import CounterMetricFamily
from prometheus_client.parser import text_string_to_metric_families
from serving import RINGCAST, Server, serve, until
from tiny_model import make_tiny_model

from ringcast.frontend.metrics.exposition import EXPERTS, PREFIX

DASHBOARD = Path(__file__).parent.parent / "docs" / "deploy" / "grafana.json"
FAKE = ("--device", "fake", "--load-format", "dummy", "--num-gpu-blocks-override", "64")
PROMPT, MOST = "x" * 40, 8


def scrape(server: Server) -> dict[str, float]:
    """The samples that have no label but the model and the one engine, by name; of the others their
    names, with 0."""
    with urllib.request.urlopen(server.url + "/metrics", timeout=30) as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    found: dict[str, float] = {}
    for family in families:
        for sample in family.samples:
            is_one = sample.labels.keys() <= {"model_name", "engine"}
            assert sample.labels.get("engine", "0") == "0"
            found[sample.name] = sample.value if is_one else 0.0
    return found


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, float]:
    """All that is exported after two equal prompts one after the other, the second streamed."""
    model = make_tiny_model(tmp_path_factory.mktemp("tiny"))
    with serve(model, *FAKE) as server:
        body = {"prompt": PROMPT, "max_tokens": MOST, "ignore_eos": True}
        assert server.post("/v1/completions", body)[0] == 200
        assert list(server.stream("/v1/completions", body))[-1] == "[DONE]"
        total = "ringcast:generation_tokens_total"
        until(lambda: scrape(server).get(total) == 2 * MOST)  # it is published once a second
        return scrape(server)


def of(measured: dict[str, float], name: str) -> float:
    return measured[f"ringcast:{name}"]


def test_the_engines_counters(measured: dict[str, float]) -> None:
    assert of(measured, "prompt_tokens_total") == 2 * len(PROMPT)
    assert of(measured, "prefix_cache_queries_total") == 2 * len(PROMPT)
    assert of(measured, "prefix_cache_hits_total") == 32  # two blocks of 16
    assert of(measured, "num_preemptions_total") == 0
    assert of(measured, "num_requests_running") == of(measured, "num_requests_waiting") == 0
    # The last token of an output is never computed.
    assert of(measured, "iteration_tokens_total_sum") == 2 * len(PROMPT) - 32 + 2 * (MOST - 1)
    assert of(measured, "iteration_tokens_total_count") == 2 * MOST


def test_times_of_both_requests(measured: dict[str, float]) -> None:
    for name in ("queue", "prefill", "decode", "inference"):
        assert of(measured, f"request_{name}_time_seconds_count") == 2
        assert of(measured, f"request_{name}_time_seconds_sum") >= 0
    for name in ("time_to_first_token", "e2e_request_latency"):
        assert of(measured, f"{name}_seconds_count") == 2
        assert 0 < of(measured, f"{name}_seconds_sum") < 60
    assert of(measured, "request_time_per_output_token_seconds_count") == 2
    parts = [of(measured, f"request_{n}_time_seconds_sum") for n in ("prefill", "decode")]
    assert sum(parts) == pytest.approx(of(measured, "request_inference_time_seconds_sum"))
    assert sum(parts) < of(measured, "e2e_request_latency_seconds_sum")
    # Of the stream alone, and a chunk may have several tokens.
    assert 1 <= of(measured, "inter_token_latency_seconds_count") < MOST


def expressions(node: Any) -> list[str]:
    """Every PromQL expression anywhere in the dashboard."""
    if isinstance(node, list):
        return [expression for item in node for expression in expressions(item)]
    if not isinstance(node, dict):
        return []
    own = [node[key] for key in ("expr", "definition") if isinstance(node.get(key), str)]
    return own + expressions(list(node.values()))


def test_the_dashboard_asks_for_what_there_is(measured: dict[str, float]) -> None:
    dashboard = json.loads(DASHBOARD.read_text())
    asked = {name for line in expressions(dashboard) for name in re.findall(r"ringcast:\w+", line)}
    of_mixtures = {
        PREFIX + name + ("_total" if kind is CounterMetricFamily else "")
        for name, (kind, _) in EXPERTS.items()
    }
    assert asked - measured.keys() == of_mixtures, "what is not there, or not shown"
    shown = {re.sub(r"_(bucket|sum|count)$", "", name) for name in asked - of_mixtures}
    there = {re.sub(r"_(bucket|sum|count|created)$", "", name) for name in measured}
    older_names = {"ringcast:time_per_output_token_seconds"}
    assert there - shown == older_names, "what is exported, and not shown"


def test_the_dashboard_is_one() -> None:
    dashboard = json.loads(DASHBOARD.read_text())
    assert dashboard["schemaVersion"] >= 36
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    for panel in panels:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        assert panel["type"] == "row" or panel["targets"]
    for line in expressions(dashboard):
        assert line.count("(") == line.count(")")
        assert line.count("{") == line.count("}")


def test_the_key_of_the_environment_is_both_the_servers_and_the_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_tiny_model(tmp_path)
    with serve(model, *FAKE, RINGCAST_API_KEY="the-key") as server:
        with pytest.raises(urllib.error.HTTPError, match="401"):
            server.get("/status")
        top = [RINGCAST, "top", "--once", "--json", "--url", server.url]
        refused = subprocess.run(top, capture_output=True, text=True, timeout=30)
        assert (refused.returncode, refused.stdout) == (2, "")
        assert "API key" in refused.stderr
        monkeypatch.setenv("RINGCAST_API_KEY", "the-key")
        allowed = subprocess.run(top, capture_output=True, text=True, timeout=30)
        assert "worker.0" in allowed.stdout
        assert '"GET /status" 401' in server.end()[1]
