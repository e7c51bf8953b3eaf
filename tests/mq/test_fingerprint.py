"""One model has one fingerprint, wherever it lies; another has another."""

from __future__ import annotations

import msgspec
import pytest

from ringcast.mq.config import ModelSpec
from ringcast.mq.fingerprint import fingerprint


def spec_in(folder) -> ModelSpec:
    folder.mkdir()
    (folder / "model-1.safetensors").write_bytes(bytes(10))
    (folder / "model.safetensors.index.json").write_text("{}")
    return ModelSpec(
        name=folder.name,
        path=str(folder),
        tokenizer_path="",
        architecture="A",
        vocab_size=9,
        max_model_len=7,
        eos_token_ids=[],
        hf_config={"a": 1, "b": {"d": 2, "c": 3}},
    )


def test_the_same_elsewhere_is_the_same(tmp_path):
    one, other = spec_in(tmp_path / "one"), spec_in(tmp_path / "other")
    reordered = msgspec.structs.replace(other, hf_config={"b": {"c": 3, "d": 2}, "a": 1})
    assert fingerprint(one) == fingerprint(other) == fingerprint(reordered)
    (tmp_path / "one" / "README.md").write_text("not the model")
    assert fingerprint(one) == fingerprint(other)


@pytest.mark.parametrize("change", ["size", "name", "index", "config"])
def test_another_is_another(tmp_path, change):
    spec = spec_in(tmp_path / "one")
    before, weights = fingerprint(spec), tmp_path / "one" / "model-1.safetensors"
    if change == "size":
        weights.write_bytes(bytes(11))
    elif change == "name":
        weights.rename(weights.with_name("model-2.safetensors"))
    elif change == "index":
        (tmp_path / "one" / "model.safetensors.index.json").write_text("{ }")
    else:
        spec = msgspec.structs.replace(spec, hf_config={"a": 2})
    assert fingerprint(spec) != before
