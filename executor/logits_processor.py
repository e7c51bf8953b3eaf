"""Logits processors of a user's own: what one is, and how the engine's option finds them.

    class NoDigits(LogitsProcessor):
        def enter(self, sequence):
            return bool((sequence.params.extra_args or {}).get("no_digits"))

        def apply(self, logits, rows, known_tokens, num_known):
            logits[:, self.digits] = -torch.inf

    ringcast serve --logits-processors my_package.processors:NoDigits

The module must be importable in the worker's process: installed, or on PYTHONPATH. Processors come
after the masks and logit_bias and before penalties and temperature, in the order of the option.
What one raises ends the engine.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from ..mq.config import EngineConfig, ModelSpec
from ..mq.errors import ConfigError
from ..mq.messages import NewSequence
from .row_lists import Ints

if TYPE_CHECKING:
    import torch


class LogitsProcessor:
    """Each worker has one instance. A row is a place in the batch, for one sequence at a time."""

    def __init__(self, config: EngineConfig, spec: ModelSpec) -> None:
        pass

    def enter(self, sequence: NewSequence) -> bool:
        """A sequence enters the batch at `sequence.row`, new or again after preemption.

        True if `apply` is to see this row from now on. `sequence.params.extra_args` is the
        request's word to processors.
        """
        return True

    def apply(self, logits: torch.Tensor, rows: Ints, known_tokens: Ints, num_known: Ints) -> None:
        """Change `logits`, float32 [R, vocabulary], in place. -inf makes a token impossible.

        rows [R]: whose they are. known_tokens[rows[i], : num_known[i]] are prompt and output of the
        i-th so far; they are not to be written.
        """
        raise NotImplementedError


def load_processors(config: EngineConfig, spec: ModelSpec) -> list[LogitsProcessor]:
    """Those of the option `logits_processors`. Raises ConfigError that names the one at fault."""
    return [_find(name)(config, spec) for name in config.logits_processors]


def _find(name: str) -> type[LogitsProcessor]:
    module, _, attribute = name.partition(":")
    if not module or not attribute:
        raise ConfigError(f"logits_processors: {name!r} must be of the form module:Class")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"logits_processors: {name!r} can't be found by the worker ({error}): it must be "
            "installed, or on PYTHONPATH"
        ) from error
    if not (isinstance(found, type) and issubclass(found, LogitsProcessor)):
        raise ConfigError(f"logits_processors: {name!r} is no subclass of {LogitsProcessor!r}")
    return found
