"""A model's tokenizer as its folder describes it: text to ids, special tokens, chat templates.

tokenizer.json holds the tokenizer itself; tokenizer_config.json, special_tokens_map.json and
chat_template.jinja what surrounds it. A folder without tokenizer.json is loaded by transformers,
with torch kept out of the process.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec
from tokenizers import Tokenizer

from ...mq.errors import ModelLoadError
from ...mq.heap import give_back_freed

SPECIAL_TOKEN_NAMES = tuple(
    f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
)
DEFAULT_TEMPLATE = "default"
TOOLS_TEMPLATE = "tool_use"
_NOTHING: Mapping[str, str] = MappingProxyType({})


class TextTokenizer:
    """Encodes text, and knows what templates and detokenizer need to know of the vocabulary.

    backend: the `tokenizers.Tokenizer`.
    special_tokens: the text of each special token that has a name ("bos_token").
    chat_templates: jinja source by name; "default" is meant where no name is said.
    vocab_size: number of tokens, added ones included.
    special_token_ids: the added tokens that skip_special_tokens leaves out.
    """

    def __init__(
        self,
        backend: Tokenizer,
        special_tokens: Mapping[str, str] = _NOTHING,
        chat_templates: Mapping[str, str] = _NOTHING,
    ) -> None:
        # Files often carry the truncation and padding of their training; serving wants neither.
        backend.no_truncation()
        backend.no_padding()
        self.backend = backend
        self.special_tokens = dict(special_tokens)
        self.chat_templates = dict(chat_templates)
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        added = backend.get_added_tokens_decoder()
        self.special_token_ids = frozenset(i for i, token in added.items() if token.special)

    @property
    def bos_token(self) -> str | None:
        return self.special_tokens.get("bos_token")

    @property
    def eos_token(self) -> str | None:
        return self.special_tokens.get("eos_token")

    @property
    def chat_template(self) -> str | None:
        return self.chat_templates.get(DEFAULT_TEMPLATE)

    def template_for(self, tools: bool) -> str | None:
        """The chat template for a request: some models have one of its own for tools."""
        named = self.chat_templates.get(TOOLS_TEMPLATE) if tools else None
        return named or self.chat_template

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        ids: list[int] = self.backend.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def encode_end(self, text: str, num_tokens: int, add_special_tokens: bool = True) -> list[int]:
        """At most `num_tokens`: the last ones of the text, and the special ones that are added."""
        encoding = self.backend.encode(text, add_special_tokens=False)
        added = self.backend.num_special_tokens_to_add(is_pair=False) if add_special_tokens else 0
        encoding.truncate(max(num_tokens - added, 0), direction="left")
        whole = self.backend.post_process(encoding, add_special_tokens=add_special_tokens)
        ids: list[int] = whole.ids
        return ids[-num_tokens:]

    def token_name(self, token_id: int) -> str:
        """What the vocabulary calls it ("Ġthe"); nothing where the tokenizer doesn't know it."""
        name: str | None = self.backend.id_to_token(token_id)
        return name or ""

    def decode(self, token_ids: list[int], skip_special_tokens: bool = True) -> str:
        text: str = self.backend.decode(token_ids, skip_special_tokens=skip_special_tokens)
        return text


def load_tokenizer(path: str) -> TextTokenizer:
    """The tokenizer of the folder `path`. Raises ModelLoadError naming the file at fault."""
    folder = Path(path)
    if not folder.is_dir():
        raise ModelLoadError(f"tokenizer folder {path!r} does not exist")
    config = _read_object(folder / "tokenizer_config.json")
    named = _read_object(folder / "special_tokens_map.json") | config
    return TextTokenizer(_backend(folder), _special_tokens(named), _chat_templates(folder, config))


def _backend(folder: Path) -> Tokenizer:
    file = folder / "tokenizer.json"
    if not file.exists():
        return _through_transformers(folder)
    try:
        backend = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises nothing narrower
        raise ModelLoadError(f"{file} is no readable tokenizer: {error}") from error
    give_back_freed()  # as much again as the tokenizer has
    return backend


def _through_transformers(folder: Path) -> Tokenizer:
    if "torch" not in sys.modules:
        # None makes `import torch` fail; transformers then does without: 245 MB less.
        sys.modules["torch"] = None  # type: ignore[assignment]
    try:
        from transformers import AutoTokenizer

        loaded = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except Exception as error:
        raise ModelLoadError(
            f"{folder} has no tokenizer.json, and transformers loads none from it: {error}"
        ) from error
    backend = getattr(loaded, "backend_tokenizer", None) or getattr(loaded, "_tokenizer", None)
    if not isinstance(backend, Tokenizer):
        raise ModelLoadError(
            f"{folder} has no tokenizer.json, and {type(loaded).__name__} can't be made one: save "
            "it as a fast tokenizer first"
        )
    return backend


def _read_object(file: Path) -> dict[str, Any]:
    if not file.exists():
        return {}
    try:
        return msgspec.json.decode(file.read_bytes(), type=dict[str, Any])
    except (msgspec.DecodeError, OSError, UnicodeDecodeError) as error:
        raise ModelLoadError(f"{file} is no readable JSON object: {error}") from error


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """Names to texts. Older files write a token as an object with its "content"."""
    tokens = {}
    for name in SPECIAL_TOKEN_NAMES:
        token = config.get(name)
        text = token.get("content") if isinstance(token, dict) else token
        if isinstance(text, str):
            tokens[name] = text
    return tokens


def _chat_templates(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """Templates by name: those of the config (a string, or a list of named ones), then of files."""
    templates: dict[str, str] = {}
    given = config.get("chat_template")
    if isinstance(given, str):
        templates[DEFAULT_TEMPLATE] = given
    elif isinstance(given, list):
        templates.update({entry["name"]: entry["template"] for entry in given})
    for file in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        templates[file.stem] = file.read_text(encoding="utf-8")
    if (file := folder / "chat_template.jinja").exists():
        templates[DEFAULT_TEMPLATE] = file.read_text(encoding="utf-8")
    return templates
