"""Tokenizers load from a folder's files, old and new, without torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from ringcast.actors.text.text_tokenizer import TextTokenizer, load_tokenizer
from ringcast.mq.errors import ModelLoadError


@pytest.fixture
def folder(tmp_path: Path, llama_like: TextTokenizer) -> Path:
    llama_like.backend.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def write(folder: Path, name: str, value: object) -> None:
    (folder / name).write_text(json.dumps(value))


def test_a_folder_with_tokenizer_json_alone(folder: Path, llama_like: TextTokenizer) -> None:
    tokenizer = load_tokenizer(str(folder))
    assert tokenizer.vocab_size == llama_like.vocab_size
    assert (tokenizer.bos_token, tokenizer.chat_template) == (None, None)
    bos, eos = (tokenizer.backend.token_to_id(text) for text in ("<s>", "</s>"))
    assert tokenizer.special_token_ids == {bos, eos}
    assert tokenizer.encode("the dog")[0] == bos
    assert tokenizer.encode("the dog", add_special_tokens=False) == tokenizer.encode("the dog")[1:]


def test_training_time_truncation_and_padding_are_off(folder: Path) -> None:
    backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.enable_truncation(4)
    backend.enable_padding(length=64)
    backend.save(str(folder / "tokenizer.json"))
    assert 4 < len(load_tokenizer(str(folder)).encode("the dog sleeps on")) < 64


def test_old_and_new_ways_to_write_special_tokens(folder: Path) -> None:
    write(folder, "special_tokens_map.json", {"bos_token": "<old>", "pad_token": {"content": "P"}})
    write(folder, "tokenizer_config.json", {"bos_token": {"content": "<s>"}, "eos_token": "</s>"})
    tokenizer = load_tokenizer(str(folder))
    expected = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "P"}
    assert tokenizer.special_tokens == expected


def test_chat_templates(folder: Path) -> None:
    write(folder, "tokenizer_config.json", {"chat_template": "one"})
    assert load_tokenizer(str(folder)).chat_template == "one"
    named = [
        {"name": "default", "template": "D"},
        {"name": "tool_use", "template": "T"},
    ]
    write(folder, "tokenizer_config.json", {"chat_template": named})
    tokenizer = load_tokenizer(str(folder))
    assert (tokenizer.template_for(tools=False), tokenizer.template_for(tools=True)) == ("D", "T")
    (folder / "chat_template.jinja").write_text("ü", encoding="utf-8")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("F")
    tokenizer = load_tokenizer(str(folder))
    assert (tokenizer.template_for(tools=False), tokenizer.template_for(tools=True)) == ("ü", "F")


def test_errors_name_the_file(folder: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"'.*/nowhere' does not exist"):
        load_tokenizer(str(folder / "nowhere"))
    (folder / "tokenizer_config.json").write_text("{")
    with pytest.raises(ModelLoadError, match=r"tokenizer_config\.json is no readable JSON"):
        load_tokenizer(str(folder))
    write(folder, "tokenizer_config.json", {})
    text = (folder / "tokenizer.json").read_text()
    (folder / "tokenizer.json").write_text(text[: len(text) // 2])
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json is no readable tokenizer"):
        load_tokenizer(str(folder))


def run_python(code: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-P", "-c", code, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


LOAD = """
import sys
from ringcast.actors.text.text_tokenizer import load_tokenizer
from ringcast.mq.errors import ModelLoadError
for folder in sys.argv[1:]:
    try:
        tokenizer = load_tokenizer(folder)
        print(tokenizer.decode(tokenizer.encode("the dog")), tokenizer.chat_template)
    except ModelLoadError as error:
        print(error)
assert sys.modules.get("torch") is None
"""


def test_without_tokenizer_json(tmp_path: Path, byte_level: TextTokenizer) -> None:
    gpt2, empty = tmp_path / "gpt2", tmp_path / "empty"
    gpt2.mkdir()
    empty.mkdir()
    byte_level.backend.model.save(str(gpt2))  # vocab.json and merges.txt
    config = {"tokenizer_class": "GPT2Tokenizer", "chat_template": "T"}
    write(gpt2, "tokenizer_config.json", config)
    said = run_python(LOAD, str(gpt2), str(empty))
    assert said.startswith(f"the dog T\n{empty} has no tokenizer.json, and transformers loads none")


def test_text_needs_no_torch() -> None:
    code = """
import sys
import ringcast.actors.text.detokenizer_core, ringcast.actors.text.tokenizer_core
assert "torch" not in sys.modules and "transformers" not in sys.modules
"""
    run_python(code)
