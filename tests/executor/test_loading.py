"""Model folders that are not as they should be: each is refused, and the culprit is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from ringcast.executor.models import MODELS, find_model
from ringcast.executor.weights import SafetensorsWeights
from ringcast.mq.errors import ModelLoadError

SHAPE = {
    "vocab_size": 60,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
}
NORM = "model.layers.1.input_layernorm.weight"
QUERY = "model.layers.0.self_attn.q_proj.weight"


@pytest.fixture
def folder(tmp_path) -> Path:
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE)).save_pretrained(tmp_path)
    return tmp_path


def edit(folder: Path, change) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def configure(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def refused(hand, folder: Path, *parts: str, **options: object) -> None:
    with pytest.raises(ModelLoadError) as error:
        hand(folder, max_model_len=64, **options)
    for part in parts:
        assert part in str(error.value)


def test_a_sound_folder_loads(folder, hand):
    hand(folder, max_model_len=64)


def test_shards_are_one_model(folder, hand, tmp_path):
    model = transformers.LlamaForCausalLM.from_pretrained(folder)
    model.save_pretrained(tmp_path / "sharded", max_shard_size="8KB")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 2
    logits = []
    for path in (folder, tmp_path / "sharded"):
        s = hand(path, max_model_len=64)
        s.enter(0, [5, 6, 7])
        s.run({0: 3})
        logits.append(s.logits[0, 3])
    assert torch.equal(*logits)


def test_no_weights(folder, hand):
    (folder / "model.safetensors").unlink()
    refused(hand, folder, str(folder), "model.safetensors", "model.safetensors.index.json")
    hand(folder, max_model_len=64, load_format="dummy")


def test_a_missing_shard(folder, hand, tmp_path):
    model = transformers.LlamaForCausalLM.from_pretrained(folder)
    model.save_pretrained(tmp_path / "sharded", max_shard_size="8KB")
    victim = sorted((tmp_path / "sharded").glob("*.safetensors"))[1]
    victim.unlink()
    refused(hand, tmp_path / "sharded", str(victim), "is missing")


@pytest.mark.parametrize("text", ["{", "{}", "[]", '{"weight_map": 5}'])
def test_a_damaged_index(folder, hand, text):
    (folder / "model.safetensors.index.json").write_text(text)
    refused(hand, folder, "model.safetensors.index.json is damaged")


@pytest.mark.parametrize("size", [0, 4, 100, 5000])
def test_a_truncated_file(folder, hand, size):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:size])
    refused(hand, folder, str(path), "truncated")


def test_a_missing_tensor(folder, hand):
    edit(folder, lambda tensors: tensors.pop(NORM))
    refused(hand, folder, NORM, "is missing")


def test_an_extra_tensor(folder, hand):
    edit(folder, lambda tensors: tensors.update({"model.extra.weight": torch.zeros(2)}))
    refused(hand, folder, "model.safetensors", "'model.extra.weight' is not part of a model")


def test_a_bias_that_the_config_does_not_know(folder, hand):
    bias = QUERY.replace("weight", "bias")
    edit(folder, lambda tensors: tensors.update({bias: torch.zeros(16)}))
    refused(hand, folder, bias)


def test_old_frequency_buffers_are_ignored(folder, hand):
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    edit(folder, lambda tensors: tensors.update({name: torch.zeros(4)}))
    hand(folder, max_model_len=64)


def test_a_tensor_of_another_shape(folder, hand):
    edit(folder, lambda tensors: tensors.update({QUERY: torch.zeros(16, 15)}))
    refused(hand, folder, "model.safetensors", QUERY, "[16, 15]", "[16, 16]")


def test_a_tensor_of_integers(folder, hand):
    edit(folder, lambda tensors: tensors.update({QUERY: torch.zeros(16, 16, dtype=torch.int32)}))
    refused(hand, folder, QUERY, "torch.int32", "bfloat16, float16 and float32")


def test_a_tensor_in_two_files(folder):
    save_file({NORM: torch.zeros(16)}, folder / "other.safetensors")
    index = {"weight_map": {"a": "model.safetensors", "b": "other.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelLoadError, match="is in both"):
        SafetensorsWeights(str(folder))


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"hidden_act": "gelu"}, ("hidden_act", "'gelu'", "'silu' is")),
        ({"quantization_config": {"quant_method": "gptq"}}, ("quantization_config",)),
        ({"num_hidden_layers": None}, ("num_hidden_layers", "None")),
        ({"vocab_size": "many"}, ("vocab_size", "'many'")),
        ({"num_key_value_heads": 3}, ("2 heads in 3 groups",)),
        ({"head_dim": 7}, ("head size 7",)),
        ({"rope_parameters": {"rope_type": "su"}}, ("'su'", "default, linear")),
        ({"architectures": ["OtherForCausalLM"]}, ("'OtherForCausalLM'", *MODELS)),
    ],
    ids=lambda value: next(iter(value)),
)
def test_configs_that_are_refused(folder, hand, changes, parts):
    configure(folder, **changes)
    refused(hand, folder, *parts)


def test_every_architecture_is_there():
    for architecture in MODELS:
        assert find_model(architecture).check
