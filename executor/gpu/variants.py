"""Variants of kernels: what Triton makes of one kernel for a type, shape or option of its launches.

They are kept in a folder of the user's, where Triton finds them at the next start: each under a
digest of its source, constants and options, of Triton's and ptxas' versions and of the kind of
device. So a folder serves any models, versions and devices, and nothing in it is ever wrong.

A digest of a source covers the constants that it and its callees take from their modules, but
Triton 3.6 leaves out those of callees that haven't got a digest yet. So one kernel has several, and
a process finds or misses what another has compiled. `settle_digests` makes them whole.

What is used of Triton here is not its public interface, but what its own disk cache and `preload`
are made of.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import pkgutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import triton.language as tl
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime import jit
from triton.runtime.cache import get_cache_key, get_cache_manager
from triton.runtime.driver import driver

from ...kernels import gpu as kernels

_LONGEST_NAME = 150  # of Triton's files


class Variant(NamedTuple):
    """name: of the kernel. data: Triton's own description, JSON (JITFunction.preload takes it)."""

    name: str
    data: str

    @property
    def signature(self) -> str:
        """Variants alike in it are launched by the same code, which Triton compiles too."""
        return json.dumps(json.loads(self.data)["signature"])

    def source(self) -> tuple[ASTSource, dict[str, Any]]:
        """What triton.compile takes, and its options."""
        data = json.loads(self.data)
        module, _, name = data["name"].rpartition(".")
        constants = zip(
            map(tuple, data["constant_keys"]), map(_constant, data["constant_vals"]), strict=True
        )
        hints = zip(map(tuple, data["attrs_keys"]), data["attrs_vals"], strict=True)
        kernel = getattr(importlib.import_module(module), name)
        options = {
            key: tuple(value) if isinstance(value, list) else value
            for key, value in data["options"].items()
        }
        return ASTSource(kernel, data["signature"], dict(constants), dict(hints)), options

    def is_compiled(self, target: tuple[str, int, int]) -> bool:
        """Whether the folder has it. target: backend, architecture, size of a warp."""
        source, options = self.source()
        backend = make_backend(GPUTarget(*target))
        variables = jit.get_cache_invalidating_env_vars()
        key = get_cache_key(source, backend, backend.parse_options(options), variables)
        found = get_cache_manager(hashlib.sha256(key.encode()).hexdigest())
        return found.get_group(f"{source.name[:_LONGEST_NAME]}.json") is not None


def settle_digests() -> None:
    """Give all kernels the digests that they have in every process. Comes before what looks into
    the folder, or writes there.
    """
    functions = {
        id(value): value
        for module in pkgutil.iter_modules(kernels.__path__, f"{kernels.__name__}.")
        for value in vars(importlib.import_module(module.name)).values()
        if isinstance(value, jit.JITCallable)
    }
    digests: list[str] | None = None
    while True:  # each round knows of callees one call deeper
        for function in functions.values():
            function.hash = None
        before, digests = digests, [function.cache_key for function in functions.values()]
        if digests == before:
            return


def _constant(value: Any) -> Any:
    """A constant of a kernel, of what Triton writes for it."""
    if isinstance(value, dict):
        return tl.constexpr(value["constexpr"])
    return tl.dtype(value) if tl.dtype.is_dtype(value) else value


def current_target() -> tuple[str, int, int]:
    """What kernels are compiled for here: backend, architecture, size of a warp."""
    target = driver.active.get_current_target()
    return target.backend, target.arch, target.warp_size


@contextmanager
def collect() -> Iterator[dict[str, Variant]]:
    """Within, launches run nothing: each one only adds its variant, in the order of the launches.

    What a launch would have written stays what it was.
    """
    found: dict[str, Variant] = {}
    launch, hook = jit.JITFunction.run, knobs.runtime.jit_cache_hook

    def note(*, fn: jit.JitFunctionInfo, compile: dict[str, Any], **_: Any) -> bool:
        variant = Variant(fn.name, compile["specialization_data"])
        found.setdefault(variant.data, variant)
        return True  # which means: don't compile

    def run(kernel: jit.JITFunction, *args: Any, grid: Any, warmup: bool, **named: Any) -> Any:
        return launch(kernel, *args, grid=grid, warmup=True, **named)

    knobs.runtime.jit_cache_hook, jit.JITFunction.run = note, run
    try:
        yield found
    finally:
        knobs.runtime.jit_cache_hook, jit.JITFunction.run = hook, launch
