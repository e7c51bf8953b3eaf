"""Microseconds of a dense product among the kernels that are beside it in a layer.

A chain is a product and the norm before it, or after it where the product adds to the residual
stream; each launch may start as the one ahead ends, as in a decode step, and reads what that wrote.
cuBLAS's chain has what it needs besides: the activation as a kernel, the addition in the norm. The
chain is repeated in a CUDA graph, with enough copies of the weight in turn that the L2 cache never
serves one.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from dense_space import Case, Shape
from timer import Timer, median

from ringcast.kernels.gpu.activation import gated_activation
from ringcast.kernels.gpu.batch_linear import batch_linear, batch_linear_scratch
from ringcast.kernels.gpu.batch_linear_table import Config
from ringcast.kernels.gpu.norm import add_rms_norm, rms_norm

CACHE_TIMES = 3  # copies of a weight together fill the L2 cache so many times
EPS = 1e-6

Launch = Callable[[torch.Tensor], object]


class Bench:
    """The inputs for one shape: copies of the weight, and everything else once. copies: 1 for a
    look at what would be launched, where the weight is never read.
    """

    def __init__(self, shape: Shape, dtype: torch.dtype, most_tokens: int, copies: int = 0) -> None:
        self.shape = shape

        def buffer(columns: int) -> torch.Tensor:
            return torch.randn(most_tokens, columns, device="cuda", dtype=dtype)

        if not copies:
            cache = torch.cuda.get_device_properties(0).L2_cache_size
            size = shape.rows * shape.inputs * dtype.itemsize
            copies = max(2, -(-CACHE_TIMES * cache // size))
        weights = torch.empty(copies, shape.rows, shape.inputs, device="cuda", dtype=dtype)
        if copies > 1:
            weights[0].normal_(std=shape.inputs**-0.5)
            weights[1:] = weights[0]
        self.weights = list(weights)
        self.x, self.out = buffer(shape.inputs), buffer(shape.outputs)
        # The stream that is normed: into x before a product, or of what it added to, after it.
        hidden = shape.outputs if shape.part == "add" else shape.inputs
        self.stream, self.normed = buffer(hidden), buffer(hidden)
        self.wide = buffer(shape.rows)
        self.norm_weight = torch.ones(hidden, device="cuda")
        self.scratch = batch_linear_scratch(most_tokens, shape.rows, "cuda")
        self._want = self.x[:0]  # of one number of tokens

    def product(self, config: Config, tokens: int, weight: torch.Tensor) -> None:
        x, out = self.x[:tokens], self.out[:tokens]
        options = {"activation": self.shape.activation, "config": config, "pdl": True}
        if self.shape.part == "add":
            out = options["add_to_TN"] = self.stream[:tokens]
        batch_linear(x, weight, out, self.scratch, **options)

    def norm(self, tokens: int) -> None:
        out = self.normed if self.shape.part == "add" else self.x
        rms_norm(self.stream[:tokens], self.norm_weight, out[:tokens], EPS, pdl=True)

    def ours(self, config: Config, tokens: int) -> Launch:
        def launch(weight: torch.Tensor) -> None:
            if self.shape.part != "add":
                self.norm(tokens)
            self.product(config, tokens, weight)
            if self.shape.part == "add":
                self.norm(tokens)

        return launch

    def cublas(self, tokens: int) -> Launch:
        x, wide, stream = self.x[:tokens], self.wide[:tokens], self.stream[:tokens]

        def launch(weight: torch.Tensor) -> None:
            if self.shape.part == "add":
                torch.mm(x, weight.T, out=wide)
                normed = self.normed[:tokens]
                add_rms_norm(wide, stream, self.norm_weight, normed, EPS, pdl=True)
                return
            self.norm(tokens)
            torch.mm(x, weight.T, out=wide)
            if self.shape.gated:
                gated_activation(wide, self.out[:tokens], self.shape.part, pdl=True)

        return launch

    def launch(self, case: Case, config: Config) -> Callable[[], object]:
        return lambda: self.ours(config, case.tokens)(self.weights[0])

    def timer(self, case: Case, config: Config | None, expected: float) -> Timer:
        """Of a chain."""
        launch = self.ours(config, case.tokens) if config else self.cublas(case.tokens)
        return Timer(self.weights, launch, expected)

    def beside(self, case: Case) -> float:
        """What a chain's norm takes by itself, one behind the other."""
        return median(Timer(self.weights, lambda weight: self.norm(case.tokens), 2.0))

    def is_right(self, case: Case, config: Config) -> bool:
        tokens = case.tokens
        if len(self._want) != tokens:
            self._want = self.want(tokens)
        got = self.stream if self.shape.part == "add" else self.out
        got[:tokens].zero_()
        self.product(config, tokens, self.weights[0])
        return torch.allclose(got[:tokens], self._want, rtol=0.04, atol=0.04)

    def want(self, tokens: int) -> torch.Tensor:
        """Of the first weight, by cuBLAS, for the x that a chain leaves."""
        self.norm(tokens)
        x = self.x[:tokens]
        y = torch.mm(x, self.weights[0].T)
        if self.shape.gated:
            wide, y = y, torch.empty_like(self.out[:tokens])
            gated_activation(wide, y, self.shape.part)
        return y
