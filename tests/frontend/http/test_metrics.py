"""/metrics over HTTP: what Prometheus' own parser reads there."""

from __future__ import annotations

import asyncio
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

PATH = "/v1/completions"


async def scrape(server: Any, **headers: str) -> dict[str, float]:
    """Every sample, by its name and labels but for the model's."""
    async with server.http.get("/metrics", headers=headers) as answer:
        assert answer.status == 200
        text = await answer.text()
    samples = {}
    for family in text_string_to_metric_families(text):
        assert family.documentation, family.name
        for sample in family.samples:
            labels = dict(sample.labels)
            assert labels.pop("model_name") == "named"
            words = "".join(f",{name}={value}" for name, value in labels.items())
            key = sample.name + words
            assert key not in samples, f"{key} is there twice"
            samples[key] = sample.value
    return samples


async def test_counts_match_what_was_asked(serve: Any, engine: Any, until: Any) -> None:
    async with serve(served_model_name=["named"]) as server:
        for _ in range(3):
            body = {"prompt": "hi", "stream": True, "max_tokens": 4}
            async with server.http.post(PATH, json=body) as answer:
                await answer.read()
        async with server.http.post(PATH, json={"prompt": ["a", "b"], "n": 2}) as answer:
            await answer.read()
        async with server.http.post(PATH, json={"prompt": "hi", "n": 0}) as answer:
            assert answer.status == 400
        engine.hold = 1
        asked = asyncio.create_task(server.http.post(PATH, json={"prompt": "hi"}))
        await until(lambda: len(engine.generated) == 6)
        asked.cancel()
        await until(lambda: engine.aborted and not engine.num_running)
        found = await scrape(server)

    def of(name: str) -> float:
        return found[f"ringcast:{name}"]

    assert of("request_success_total,finished_reason=length") == 3
    assert of("request_success_total,finished_reason=stop") == 4
    assert of("request_success_total,finished_reason=abort") == 1
    assert of("request_success_total,finished_reason=error") == 0
    assert of("request_generation_tokens_count") == 8
    assert of("request_generation_tokens_sum") == 3 * 4 + 4 * 5 + 1
    assert of("request_generation_tokens_bucket,le=2.0") == 1
    assert of("request_generation_tokens_bucket,le=5.0") == 8
    assert of("request_prompt_tokens_sum") == 6 * 7
    assert of("request_params_n_sum") == 3 + 2 * 2 + 1
    assert of("request_params_max_tokens_sum") == 3 * 4 + 3 * 16
    assert of("e2e_request_latency_seconds_count") == 6
    assert of("time_to_first_token_seconds_count") == 3  # the fake engine has no timings
    assert of("inter_token_latency_seconds_count") == 3 * 3
    assert of("time_per_output_token_seconds_count") == 3 * 3
    assert of("actor_cpu_seconds_total,actor=worker.0") == 1.5
    assert of("actor_resident_memory_bytes,actor=worker.0") == 2**20
    assert of("actor_restarts_total,actor=worker.0") == 0
    assert of("channel_fill,channel=client.0>tokenizer.0") == 0.01


async def test_openmetrics_where_it_is_asked_for(serve: Any) -> None:
    accept = "application/openmetrics-text; version=1.0.0"
    async with serve() as server:
        async with server.http.get("/metrics", headers={"Accept": accept}) as answer:
            assert answer.content_type == "application/openmetrics-text"
            assert (await answer.text()).endswith("# EOF\n")
        async with server.http.get("/metrics") as answer:
            assert answer.content_type == "text/plain"
