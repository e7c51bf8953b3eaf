"""The configurations of few_linear, a product of one token, that are worth a try."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

from ringcast.kernels.gpu.few_linear_table import Config, configuration, per_thread, rule


class Shape(NamedTuple):
    rows: int
    inputs: int
    parts: tuple[str, ...] = ()  # of "norm", "add", "silu", "gelu_tanh"

    @property
    def activation(self) -> str | None:
        return next((part for part in self.parts if part in ("silu", "gelu_tanh")), None)

    @property
    def gated(self) -> bool:
        return self.activation is not None

    def __str__(self) -> str:
        return f"{self.rows}x{self.inputs}" + (f":{','.join(self.parts)}" if self.parts else "")


def layer(hidden: int, heads: int, kv_heads: int, size: int, inner: int, vocab: int) -> list[Shape]:
    return [
        Shape((heads + 2 * kv_heads) * size, hidden, ("norm",)),
        Shape(hidden, heads * size, ("add",)),
        Shape(2 * inner, hidden, ("norm", "silu")),
        Shape(hidden, inner, ("add",)),
        Shape(vocab, hidden, ("norm",)),
    ]


MODELS = {
    "smollm2-135m": layer(576, 9, 3, 64, 1536, 49152),
    "qwen3-0.6b": layer(1024, 16, 8, 128, 3072, 151936),
    "llama-3.1-8b": layer(4096, 32, 8, 128, 14336, 128256),
}


def candidates(shape: Shape) -> Iterator[Config]:
    """What the table has and the rule says, then all others that keep registers and programs within
    reason.
    """
    chosen = dict.fromkeys([configuration(*shape[:2], shape.gated), rule(*shape[:2], shape.gated)])
    yield from chosen
    whole = 1 << (shape.inputs - 1).bit_length()
    blocks = [block for block in (512, 1024, 2048, 4096, 8192) if block <= whole]
    outputs = shape.rows // 2 if shape.gated else shape.rows
    for rows, warps, block in product((1, 2, 4, 8), (2, 4, 8), blocks):
        config = Config(rows, warps, block)
        held = per_thread(config, shape.inputs, shape.gated)
        enough = outputs // rows >= 256 or rows == 1
        if config not in chosen and enough and 16 <= held <= 128 and -(-shape.inputs // block) <= 8:
            yield config
