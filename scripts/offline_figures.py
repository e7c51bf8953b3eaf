"""The figures of scripts/bench offline from its cases' seconds, and their floors.

A floor is the larger of bytes over the memory's rate and operations over the matrix units' rate,
summed over the steps: weights once a step, each key and value once for each step that attends to
it, dense products at full rate.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any, NamedTuple

Seconds = dict[str, list[tuple[float, int, int]]]  # case: (seconds, tokens in, tokens out)

BANDWIDTH = 4.3e12  # bytes/s, of a device-to-device copy on an H200
RATE = 790e12  # FLOP/s, of an 8,192-cubed bf16 product there


class Shape(NamedTuple):
    """body, head: parameters in the layers' and the last product. kv_bytes: of a token, bf16.
    attention: FLOP of a token that attends to one other.
    """

    body: int
    head: int
    kv_bytes: int
    attention: int


def shape(config: dict[str, Any]) -> Shape:
    hidden, layers, heads = (
        config[name] for name in ("hidden_size", "num_hidden_layers", "num_attention_heads")
    )
    kv_heads = config["num_key_value_heads"]
    size = config.get("head_dim") or hidden // heads
    layer = 2 * hidden * (heads + kv_heads) * size + 3 * hidden * config["intermediate_size"]
    return Shape(
        layer * layers,
        config["vocab_size"] * hidden,
        4 * layers * kv_heads * size,
        4 * layers * heads * size,
    )


class Figure(NamedTuple):
    """read: from the cases' seconds to each round's figure. floor: the same unit."""

    name: str
    unit: str
    read: Callable[[Seconds], list[float]]
    floor: Callable[[Shape], float]


def figures() -> list[Figure]:
    def each(case: str, of: Callable[[float, int, int], float]) -> Callable[[Seconds], list[float]]:
        return lambda seconds: [of(*entry) for entry in seconds.get(case, [])]

    def step(s: Shape, batch: int, context: float) -> float:
        return 1e3 * (2 * (s.body + s.head) + batch * context * s.kv_bytes) / BANDWIDTH

    def decode_256(num_in: int) -> Figure:
        """Of steps with all 256 sequences: that prompts are prefilled, and end, one after the
        other is in both cases, and not in their difference.
        """

        def read(seconds: Seconds) -> list[float]:
            short = [s for s, *_ in seconds.get(f"batch 256 of {num_in}, 64 out", [])]
            before = statistics.median(short) if short else 0.0
            long = seconds.get(f"batch 256 of {num_in}, 192 out", []) if short else []
            return [1e3 * (s - before) / 128 for s, *_ in long]

        name = f"batch 256 at {num_in + 64} to {num_in + 192}"
        return Figure(name, "ms/step", read, lambda s: step(s, 256, num_in + 128))

    def prefill(s: Shape) -> float:
        return 65536 * RATE / (2 * s.body * 65536 + s.attention * 32 * 2048**2 / 2)

    return [
        Figure("first token", "s", each("first token", lambda s, i, o: s), lambda s: 0.0),
        *(
            Figure(
                f"batch {n}, 32 in, 128 out",
                "ms/token",
                each(f"batch {n}", lambda s, i, o: 1e3 * s / 128),
                lambda s, n=n: step(s, n, 96),  # type: ignore[misc]
            )
            for n in (1, 8, 64)
        ),
        decode_256(572),
        decode_256(672),
        Figure(
            "prefill 32 x 2,048",
            "tok/s",
            each("prefill 32 x 2,048", lambda s, i, o: i / s),
            prefill,
        ),
        Figure("offline256", "tok/s", each("offline256", lambda s, i, o: o / s), offline256_floor),
    ]


def offline256_floor(s: Shape) -> float:
    """Output tokens per second."""
    from offline_cases import cases

    (case,) = cases(["offline256"])
    lengths = [len(prompt) for prompt in case.prompts]
    pairs = list(zip(lengths, case.max_tokens, strict=True))
    read = sum(out * num_in + out * (out - 1) // 2 for num_in, out in pairs)
    memory = max(case.max_tokens) * 2 * (s.body + s.head) + read * s.kv_bytes
    dense = 2 * s.body * case.num_in + s.attention * sum(n**2 for n in lengths) / 2
    return case.num_out / (memory / BANDWIDTH + dense / RATE)
