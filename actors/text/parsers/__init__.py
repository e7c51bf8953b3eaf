"""Parsers of what models write into their text: tool calls, and reasoning.

A parser is found through the registries here by the name that `--tool-call-parser` or
`--reasoning-parser` gives. parser.py says what one is, output_parser.py how a choice's output goes
through them.
"""

from __future__ import annotations

import importlib
from typing import Any

TOOL_PARSERS = {
    "deepseek_v3": "ringcast.actors.text.parsers.deepseek_v3:DeepSeekV3Parser",
    "hermes": "ringcast.actors.text.parsers.hermes:HermesParser",
    "llama3_json": "ringcast.actors.text.parsers.llama3_json:Llama3JsonParser",
    "mistral": "ringcast.actors.text.parsers.mistral:MistralParser",
    "pythonic": "ringcast.actors.text.parsers.pythonic:PythonicParser",
    "qwen3_coder": "ringcast.actors.text.parsers.qwen3_coder:Qwen3CoderParser",
    "qwen3_xml": "ringcast.actors.text.parsers.qwen3_coder:Qwen3CoderParser",  # vLLM has both
}
REASONING_PARSERS = {
    "deepseek_r1": "ringcast.actors.text.parsers.deepseek_r1:DeepSeekR1Parser",
    "mistral": "ringcast.actors.text.parsers.mistral_think:MistralThinkParser",
    "qwen3": "ringcast.actors.text.parsers.qwen3:Qwen3Parser",
}


def find_parser(registry: dict[str, str], name: str) -> Any:
    """The class of a parser. An unknown name is a KeyError: the options accept none."""
    module, _, attribute = registry[name].partition(":")
    return getattr(importlib.import_module(module), attribute)
