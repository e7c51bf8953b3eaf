"""Ringcast: an LLM inference and serving engine of actors over shared-memory rings."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from .frontend.async_llm import AsyncLLM
    from .frontend.beam_search import BeamSearchOutput, BeamSearchParams
    from .frontend.embedding import EmbeddingOutput, EmbeddingRequestOutput
    from .frontend.llm import LLM
    from .frontend.outputs import CompletionOutput, RequestOutput
    from .mq.sampling_params import RequestOutputKind, SamplingParams

_HOMES = {
    "LLM": "ringcast.frontend.llm",
    "AsyncLLM": "ringcast.frontend.async_llm",
    "BeamSearchOutput": "ringcast.frontend.beam_search",
    "BeamSearchParams": "ringcast.frontend.beam_search",
    "CompletionOutput": "ringcast.frontend.outputs",
    "EmbeddingOutput": "ringcast.frontend.embedding",
    "EmbeddingRequestOutput": "ringcast.frontend.embedding",
    "RequestOutput": "ringcast.frontend.outputs",
    "RequestOutputKind": "ringcast.mq.sampling_params",
    "SamplingParams": "ringcast.mq.sampling_params",
}

__all__ = [
    "LLM",
    "AsyncLLM",
    "BeamSearchOutput",
    "BeamSearchParams",
    "CompletionOutput",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'ringcast' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)
