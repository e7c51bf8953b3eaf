"""The dashboard in docs/deploy, by Grafana's typed models and a parser of PromQL.

It has to be what the models say in each field, and each of its expressions has to be one of
metrics, and labels of theirs, that a server's /metrics has.
"""

from __future__ import annotations

import enum
import json
import re
import time
import typing
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser as promql
from cases import KEY, MODEL, case, run, url
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard

GIVEN = json.loads(
    (Path(__file__).resolve().parents[2] / "docs" / "deploy" / "grafana.json").read_text()
)
# Grafana writes it beside a variable's query, and its schema hasn't got it.
UNKNOWN_TO_THE_MODELS = {"$.templating.list[1].definition"}
# What only a mixture of experts has, which this server's model is none of.
OF_MIXTURES = re.compile(r"ringcast:(expert|eplb)_\w+")
COUNTED = ("_total", "_bucket", "_sum", "_count")
PATIENCE = 20.0  # seconds

Labels = frozenset[str]


@case("all of it in Grafana's models")
def models() -> None:
    register_default_plugins()
    dashboard = Dashboard.from_json(GIVEN)
    assert not (wrong := list(misfits(dashboard, Dashboard))), wrong
    again = json.loads(json.dumps(dashboard, cls=JSONEncoder))
    gone = set(lost(GIVEN, again))
    assert gone == UNKNOWN_TO_THE_MODELS, gone


def misfits(value: Any, wanted: Any, place: str = "$") -> Iterator[str]:
    """The places whose values are of another type than a model says."""
    if wanted in (Any, object) or value is None:
        return
    if (origin := typing.get_origin(wanted)) is typing.Union:
        choices = [list(misfits(value, one, place)) for one in typing.get_args(wanted)]
        yield from min(choices, key=len)
    elif origin is list and isinstance(value, list):
        (inner,) = typing.get_args(wanted)
        for i, item in enumerate(value):
            yield from misfits(item, inner, f"{place}[{i}]")
    elif origin is typing.Literal:
        if value not in typing.get_args(wanted):
            yield f"{place}: {value!r} is none of {wanted}"
    elif isinstance(wanted, type) and issubclass(wanted, enum.Enum):
        if value not in [member.value for member in wanted]:
            yield f"{place}: {value!r} is no {wanted.__name__}"
    elif not isinstance(value, (int, float) if wanted is float else origin or wanted):
        yield f"{place}: {value!r} is no {wanted}"
    elif hasattr(value, "to_json"):
        for name, inner in typing.get_type_hints(type(value)).items():
            yield from misfits(getattr(value, name), inner, f"{place}.{name}")


def lost(given: Any, again: Any, place: str = "$") -> Iterator[str]:
    """What is not the same any more."""
    if isinstance(given, dict) and isinstance(again, dict):
        for name, value in given.items():
            yield from lost(value, again.get(name), f"{place}.{name}")
    elif isinstance(given, list) and isinstance(again, list) and len(given) == len(again):
        for i, (one, other) in enumerate(zip(given, again, strict=True)):
            yield from lost(one, other, f"{place}[{i}]")
    elif given != again:
        yield place


@case("each expression, of metrics and labels that there are")
def expressions() -> None:
    there = metrics()
    targets = [target for panel in GIVEN["panels"] for target in panel.get("targets", [])]
    assert len(targets) > 40, len(targets)
    for target in targets:
        text = target["expr"].replace("$__rate_interval", "1m")
        labels = labels_of(promql.parse(text), there)
        shown = set(re.findall(r"\{\{\s*(\w+)\s*\}\}", target["legendFormat"]))
        assert shown <= labels, f"{text} has {set(labels)}, and its legend wants {shown}"
    variables = [variable["query"] for variable in GIVEN["templating"]["list"]]
    (query,) = [query["query"] for query in variables if isinstance(query, dict)]
    found = re.fullmatch(r"label_values\(([\w:]+), (\w+)\)", query)
    assert found and found[2] in there[found[1]], query


def metrics() -> dict[str, Labels]:
    """The labels of each sample of /metrics, after a request."""
    body = json.dumps({"model": MODEL, "prompt": "a", "max_tokens": 4, "ignore_eos": True})
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    asked = urllib.request.Request(url("fake", "/v1/completions"), body.encode(), headers)
    urllib.request.urlopen(asked, timeout=PATIENCE).close()
    deadline = time.monotonic() + PATIENCE
    while True:
        with urllib.request.urlopen(url("fake", "/metrics"), timeout=PATIENCE) as answer:
            text = answer.read().decode()
        if re.search(r"ringcast:generation_tokens_total\{.*\} [1-9]", text):
            break
        assert time.monotonic() < deadline, text[:2000]
        time.sleep(0.2)
    samples = re.findall(r"^([\w:]+)\{(.*)\} ", text, re.MULTILINE)
    return {name: frozenset(re.findall(r'(\w+)="', labels)) for name, labels in samples}


def labels_of(node: Any, there: dict[str, Labels]) -> Labels:
    """Those of an expression's result. Raises AssertionError for what /metrics hasn't got."""
    if isinstance(node, promql.VectorSelector):
        if OF_MIXTURES.fullmatch(node.name):
            there = {node.name: frozenset({"model_name", "engine"})}
        assert node.name in there, f"there is no {node.name}"
        matched = {matcher.name for matcher in node.matchers.matchers}
        assert matched <= there[node.name], f"{node}: there are {set(there[node.name])}"
        return there[node.name]
    if isinstance(node, promql.MatrixSelector):
        return labels_of(node.vector_selector, there)
    if isinstance(node, promql.Call):
        *_, last = node.args
        labels = labels_of(last, there)
        if node.func.name in ("rate", "increase"):
            name = last.vector_selector.name
            assert name.endswith(COUNTED), f"{node}: {name} is no counter"
        if node.func.name == "histogram_quantile":
            assert "le" in labels, f"{node}: no buckets"
            return labels - {"le"}
        return labels
    if isinstance(node, promql.AggregateExpr):
        kept = frozenset(node.modifier.labels if node.modifier else ())
        inner = labels_of(node.expr, there)
        assert kept <= inner, f"{node}: there are {set(inner)}"
        return kept
    assert isinstance(node, promql.BinaryExpr), f"{node}: not looked into here"
    return labels_of(node.lhs, there) & labels_of(node.rhs, there)


if __name__ == "__main__":
    run()
