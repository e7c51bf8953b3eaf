"""Model architectures, found through the registry here by the name that config.json gives."""

from __future__ import annotations

import importlib
from typing import Any

from ...mq.errors import ModelLoadError

MODELS = {
    "BertModel": "ringcast.executor.models.bert:BERT",
    "Gemma3ForCausalLM": "ringcast.executor.models.gemma3:GEMMA3",
    "LlamaForCausalLM": "ringcast.executor.models.llama:LLAMA",
    "MistralForCausalLM": "ringcast.executor.models.llama:MISTRAL",
    "MixtralForCausalLM": "ringcast.executor.models.mixtral:MIXTRAL",
    "Qwen2ForCausalLM": "ringcast.executor.models.llama:QWEN2",
    "Qwen3ForCausalLM": "ringcast.executor.models.llama:QWEN3",
    "Qwen3MoeForCausalLM": "ringcast.executor.models.qwen3_moe:QWEN3_MOE",
}


def find_model(architecture: str) -> Any:
    """The model family of an architecture. Raises ModelLoadError that lists what is supported."""
    target = MODELS.get(architecture)
    if target is None:
        raise ModelLoadError(
            f"architecture {architecture!r} is not supported; {', '.join(MODELS)} are"
        )
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)
