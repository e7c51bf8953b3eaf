"""`scripts/tune dense`: products of some tokens (batch_linear), beside cuBLAS."""

from __future__ import annotations

from argparse import ArgumentTypeError

import torch
from chain import Bench
from dense_space import MODELS, Case, Shape, first_round, second_round
from search import Search, Subject, report

from ringcast.kernels.gpu.batch_linear_table import TUNED, Config

Tuned = dict[tuple[int, int, bool], dict[int, Config | None]]


class Dense(Subject):
    """One shape, by so many tokens."""

    library = "cuBLAS"

    def __init__(self, shape: Shape, tokens: list[int]) -> None:
        self.cases: list[Case] = [Case(shape, each) for each in tokens]

    def first_round(self, case: Case, most: int) -> list[Config]:
        return first_round(case, most)

    def second_round(self, case: Case, best: list[Config]) -> list[Config]:
        return second_round(case, best)

    def baseline(self, case: Case) -> None:
        """cuBLAS, which is what shapes that have no entry get."""
        return None

    def floor(self, case: Case) -> float:
        return max(case.num_bytes / 4.3e6, case.operations / 790e6)

    def open(self, look: bool = False) -> Bench:
        most = max(case.tokens for case in self.cases)
        return Bench(self.cases[0].shape, torch.bfloat16, most, copies=1 if look else 0)


def summary(search: Search, models: list[str]) -> str:
    """Two tables: of products, less the norm of their chain, and of the layers they make."""
    lines = report(search, search.cases, "cuBLAS")
    lines += [
        "",
        "| layer, chains with its norms | tokens | table | cuBLAS | floor of the products |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name in models:
        for tokens in dict.fromkeys(case.tokens for case in search.cases):
            cases = [Case(shape, tokens) for shape in MODELS[name][:4]]
            found = [search.best(case) for case in cases if case in search.times]
            if len(found) == 4 and all(found):
                ours = sum(min(best[1:]) for best in found if best)
                cublas = sum(best.baseline for best in found if best)
                least = sum(search.subject[case].floor(case) for case in cases)
                lines.append(f"| {name} | {tokens} | {ours:.2f} | {cublas:.2f} | {least:.2f} |")
    return "\n".join(lines)


def table(search: Search) -> Tuned:
    """TUNED with what was found."""
    tuned = {key: dict(by_tokens) for key, by_tokens in TUNED.items()}
    for case in search.cases:
        if best := search.best(case):
            key = (*case.shape[:2], case.shape.gated)
            tuned.setdefault(key, {})[case.tokens] = best.config if best.is_worth_it else None
    return in_order(tuned)


def in_order(tuned: Tuned) -> Tuned:
    """By tokens, without shapes that are cuBLAS's whatever the tokens."""
    return {key: dict(sorted(each.items())) for key, each in tuned.items() if any(each.values())}


def parse_shape(text: str) -> Shape:
    size, _, part = text.partition(":")
    rows, _, inputs = size.partition("x")
    if part not in ("", "add", "silu", "gelu_tanh") or not (rows.isdigit() and inputs.isdigit()):
        raise ArgumentTypeError(f"{text!r} isn't ROWSxINPUTS[:add|:silu|:gelu_tanh]")
    return Shape(int(rows), int(inputs), part)
