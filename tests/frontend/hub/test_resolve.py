"""From a model's name to its ModelSpec, and every way to get it wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ringcast.frontend.hub import pull_model, resolve_model
from ringcast.mq.config import EngineConfig, ModelSpec
from ringcast.mq.errors import ConfigError, ModelLoadError


def resolve(folder: Path, **options: Any) -> ModelSpec:
    return resolve_model(EngineConfig(model=str(folder), **options))


def test_folder(make_model: Any) -> None:
    folder = make_model(generation={"temperature": 0.6})
    spec = resolve(folder)
    assert spec == ModelSpec(
        name=str(folder),
        path=str(folder),
        tokenizer_path=str(folder),
        architecture="LlamaForCausalLM",
        vocab_size=8,
        max_model_len=64,
        eos_token_ids=[2],
        hf_config=spec.hf_config,
        bos_token_id=1,
        chat_template=None,
        sampling_defaults={"temperature": 0.6},
    )
    assert spec.hf_config["max_position_embeddings"] == 64
    assert pull_model(str(folder)) == folder


def test_folder_by_relative_path(make_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_model("mine")
    monkeypatch.chdir(folder.parent)
    spec = resolve(Path("mine"))
    assert (spec.name, spec.path) == ("mine", str(folder))


# --- what is needed -------------------------------------------------------------------------------


def test_weights_are_needed_only_where_they_are_loaded(make_model: Any) -> None:
    folder = make_model(weights=False)
    with pytest.raises(ModelLoadError, match="--load-format dummy needs none"):
        resolve(folder)
    assert resolve(folder, load_format="dummy").path == str(folder)
    assert resolve(folder, device="fake").path == str(folder)


def test_tokenizer_from_another_model(make_model: Any) -> None:
    folder = make_model("bare", weights=False, tokenizer=False)
    with pytest.raises(ModelLoadError, match=r"no tokenizer\.json in .*; --tokenizer takes it"):
        resolve(folder, load_format="dummy")
    other = make_model("other", weights=False, eos_token_id=7)
    spec = resolve(folder, load_format="dummy", tokenizer=str(other))
    assert (spec.path, spec.tokenizer_path) == (str(folder), str(other))
    assert spec.eos_token_ids == [2]


def test_trust_remote_code_is_refused_with_the_reason(make_model: Any) -> None:
    with pytest.raises(ConfigError, match="never run here, because it could do anything"):
        resolve(make_model(), trust_remote_code=True)


@pytest.mark.parametrize("name", ["architectures", "vocab_size", "max_position_embeddings"])
def test_config_without(make_model: Any, name: str) -> None:
    with pytest.raises(ModelLoadError, match=rf"config\.json.*{name}"):
        resolve(make_model(**{name: ...}))


# --- context length -------------------------------------------------------------------------------

YARN = {"rope_type": "yarn", "factor": 4.0}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, 64),
        ({"sliding_window": 16}, 64),
        ({"rope_scaling": None}, 64),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, 128),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 1.5}}, 96),
        ({"rope_scaling": YARN}, 256),
        ({"rope_scaling": {**YARN, "original_max_position_embeddings": 16}}, 64),
        ({"rope_parameters": {**YARN, "original_max_position_embeddings": 32}}, 128),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, 64),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, 64),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 8.0}}, 64),
        ({"model_type": "gemma3_text", "rope_scaling": {"type": "linear", "factor": 8}}, 64),
        ({"text_config": {"vocab_size": 8, "max_position_embeddings": 48}}, 48),
    ],
)
def test_context_length(make_model: Any, config: dict[str, Any], expected: int) -> None:
    folder = make_model(**config)
    assert resolve(folder).max_model_len == expected
    assert resolve(folder, max_model_len=expected).max_model_len == expected
    assert resolve(folder, max_model_len=5).max_model_len == 5
    with pytest.raises(ConfigError, match=f"max_model_len = {expected + 1}: .* {expected} tokens"):
        resolve(folder, max_model_len=expected + 1)
    with pytest.raises(ConfigError, match=r"max_model_len = 1: .* no room"):
        resolve(folder, max_model_len=1)


def test_context_length_that_only_the_user_knows(make_model: Any) -> None:
    folder = make_model(max_position_embeddings=...)
    assert resolve(folder, max_model_len=99).max_model_len == 99


@pytest.mark.parametrize("value", ["64", 0, True, 6.5])
def test_context_length_of_a_wrong_type(make_model: Any, value: Any) -> None:
    with pytest.raises(ModelLoadError, match=r"max_position_embeddings is .*, not a positive"):
        resolve(make_model(max_position_embeddings=value))


# --- special tokens -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "generation", "tokenizer", "expected"),
    [
        (2, {"eos_token_id": [3, 4]}, "</s>", [3, 4]),
        (2, {"eos_token_id": 3}, "</s>", [3]),
        (2, {}, "</s>", [2]),
        ([1, 2], None, "</s>", [1, 2]),
        (None, {"eos_token_id": None}, "</s>", [6]),
        (None, None, {"content": "</s>"}, [6]),
        (None, None, "<|im_end|>", [7]),
        (None, None, "<nowhere>", []),
        (None, None, None, []),
    ],
)
def test_eos(
    make_model: Any, config: Any, generation: Any, tokenizer: Any, expected: list[int]
) -> None:
    folder = make_model(eos_token_id=config, generation=generation)
    add_special_token(folder, "eos_token", tokenizer)
    assert resolve(folder).eos_token_ids == expected
    assert resolve(folder, generation_config="none").eos_token_ids == expected


@pytest.mark.parametrize(
    ("config", "generation", "tokenizer", "expected"),
    [
        (1, {"bos_token_id": 3}, "<s>", 1),
        (None, {"bos_token_id": 3}, "<s>", 3),
        (None, None, "<s>", 5),
        (None, None, None, None),
    ],
)
def test_bos(
    make_model: Any, config: Any, generation: Any, tokenizer: Any, expected: int | None
) -> None:
    folder = make_model(bos_token_id=config, generation=generation)
    add_special_token(folder, "bos_token", tokenizer)
    assert resolve(folder).bos_token_id == expected


def add_special_token(folder: Path, key: str, token: Any) -> None:
    tokens = [{"id": 7, "content": "<|im_end|>"}]
    model = {"vocab": {"a": 0, "<s>": 5, "</s>": 6}}
    (folder / "tokenizer.json").write_text(json.dumps({"added_tokens": tokens, "model": model}))
    (folder / "tokenizer_config.json").write_text(json.dumps({key: token}))


# --- sampling defaults ----------------------------------------------------------------------------


def test_sampling_defaults(make_model: Any) -> None:
    values = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
    }
    others = {"max_new_tokens": 7, "do_sample": False, "eos_token_id": 2}
    folder = make_model(generation={**values, **others})
    assert resolve(folder).sampling_defaults == {**values, "max_tokens": 7}
    assert resolve(folder, generation_config="none").sampling_defaults == {}
    with pytest.raises(ConfigError, match="'vllm': accepted are 'auto' and 'none'"):
        resolve(folder, generation_config="vllm")


def test_null_is_no_default(make_model: Any) -> None:
    assert resolve(make_model(generation={"top_p": None, "top_k": 3})).sampling_defaults == {
        "top_k": 3
    }


def test_impossible_sampling_default(make_model: Any) -> None:
    folder = make_model(generation={"top_p": 1.5})
    with pytest.raises(ModelLoadError, match=r"generation_config\.json: top_p must be .* got 1\.5"):
        resolve(folder)
    with pytest.raises(ModelLoadError, match=r"json: repetition_penalty must be .* got 0"):
        resolve(make_model("other", generation={"repetition_penalty": 0}))
    assert resolve(folder, generation_config="none").sampling_defaults == {}


# --- chat template --------------------------------------------------------------------------------


def test_chat_template(make_model: Any, tmp_path: Path) -> None:
    folder = make_model()
    literal = "{% for m in messages %}{{ m.content }}{% endfor %}"
    file = tmp_path / "chat.jinja"
    file.write_text("from a file")
    assert resolve(folder, chat_template=literal).chat_template == literal
    assert resolve(folder, chat_template=str(file)).chat_template == "from a file"
    with pytest.raises(ConfigError, match=r"'chatml': neither a jinja template .* nor a file"):
        resolve(folder, chat_template="chatml")
    with pytest.raises(ConfigError, match=r"chat_template = .*Is a directory"):
        resolve(folder, chat_template=str(tmp_path))


# --- names ----------------------------------------------------------------------------------------


def test_catalogue_name_comes_before_a_folder(
    world: Any, make_model: Any, monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    folder = make_model("tiny")
    monkeypatch.chdir(folder.parent)
    assert resolve(Path("tiny")).path == str(cache / "tiny")
    assert resolve_model(EngineConfig(model="./tiny")).path == str(folder)


@pytest.mark.parametrize("model", ["./no", "~/no", "/no/where", "no.gguf", "a/b/c", "no/"])
def test_path_of_nothing(model: str) -> None:
    with pytest.raises(ModelLoadError, match=f"^no file or folder '{model}'$"):
        resolve_model(EngineConfig(model=model))


@pytest.mark.parametrize("model", ["smollm", "", "org/na me", "-x/y"])
def test_name_of_nothing(model: str) -> None:
    with pytest.raises(ModelLoadError, match=f"^no model '{model}': a model is a name from"):
        resolve_model(EngineConfig(model=model))


@pytest.mark.parametrize("model", ["tiny", "folder", "nowhere"])
def test_revision_of_what_has_none(
    world: Any, make_model: Any, monkeypatch: pytest.MonkeyPatch, model: str
) -> None:
    monkeypatch.chdir(make_model("folder").parent)
    with pytest.raises(ConfigError, match=f"'main': only hub ids have revisions, not '{model}'"):
        resolve_model(EngineConfig(model=model, revision="main"))


def test_nothing_here_imports_torch(make_model: Any) -> None:
    code = (
        "import pkgutil, sys, ringcast.frontend.hub as hub\n"
        "for module in pkgutil.iter_modules(hub.__path__, 'ringcast.frontend.hub.'):\n"
        "    __import__(module.name)\n"
        "from ringcast.mq.config import EngineConfig\n"
        f"hub.resolve_model(EngineConfig(model={str(make_model())!r}))\n"
        "heavy = {'torch', 'transformers', 'huggingface_hub', 'gguf'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
