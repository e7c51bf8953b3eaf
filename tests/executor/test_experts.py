"""Mixtures of experts on small random weights against transformers: Qwen3-MoE and Mixtral, whose
checkpoints have other names, routers and windows; what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from ringcast.executor.models import find_model
from ringcast.mq.errors import ConfigError, ModelLoadError

WINDOW = 8
COMMON = {
    "vocab_size": 90,
    "hidden_size": 40,
    "intermediate_size": 56,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
QWEN3_MOE = COMMON | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
}
MIXTRAL = COMMON | {
    "architectures": ["MixtralForCausalLM"],
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
}
MODELS = {
    "qwen3": QWEN3_MOE | {"norm_topk_prob": True},
    "qwen3 shares": QWEN3_MOE | {"norm_topk_prob": False, "attention_bias": True},
    "qwen3 dense layers": QWEN3_MOE
    | {
        "num_experts_per_tok": 1,
        "decoder_sparse_step": 2,
        "mlp_only_layers": [3],
        "use_sliding_window": True,
        "sliding_window": WINDOW,
    },
    "mixtral": MIXTRAL,
    "mixtral windows": MIXTRAL | {"sliding_window": WINDOW, "tie_word_embeddings": True},
}
BLOCKS = {"num_gpu_blocks_override": 600}


def make_reference(name: str) -> torch.nn.Module:
    values = dict(MODELS[name])
    is_mixtral = values.pop("architectures") == ["MixtralForCausalLM"]
    config = (transformers.MixtralConfig if is_mixtral else transformers.Qwen3MoeConfig)(**values)
    family = transformers.MixtralForCausalLM if is_mixtral else transformers.Qwen3MoeForCausalLM
    torch.manual_seed(3)
    made = family._from_config(config, attn_implementation="eager").eval()
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, 0.0, 0.2)
    made.tie_weights()
    return made


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory):
    made = {}

    def make(name: str) -> tuple[Path, torch.nn.Module]:
        if name not in made:
            reference = make_reference(name)
            folder = tmp_path_factory.mktemp("experts")
            reference.save_pretrained(folder)
            made[name] = folder, reference
        return made[name]

    return make


def random_tokens(seed: int, length: int) -> list[int]:
    return torch.randint(3, 90, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@torch.no_grad()
def worst_error(scheduler, reference: torch.nn.Module, row: int) -> float:
    """Of the logits from which the row's tokens were chosen, beside the largest of them."""
    expected = reference(torch.tensor([scheduler.known[row]])).logits[0].float()
    mine = {position: logits for (r, position), logits in scheduler.logits.items() if r == row}
    assert mine
    return max(
        float((logits - expected[position - 1]).abs().max() / expected[position - 1].abs().max())
        for position, logits in mine.items()
    )


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("chunk", [5, 200])
def test_prompts_in_chunks_and_decoding(model, hand, name: str, chunk: int) -> None:
    """Steps of few tokens and of many, whose products are others; and the same tokens."""
    folder, reference = model(name)
    s = hand(folder, block_size=4, max_num_batched_tokens=256, **BLOCKS)
    length = 91
    s.enter(2, prompt := random_tokens(length, length))
    for start in range(0, length, chunk):
        s.run({2: min(chunk, length - start)})
    for _ in range(12):
        s.run({2: 1})
    assert worst_error(s, reference, 2) < 1e-4
    wanted = reference.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, length, dtype=torch.long),
        max_new_tokens=13,
        min_new_tokens=13,
        do_sample=False,
        eos_token_id=None,
    )
    assert s.known[2] == wanted[0].tolist()


@pytest.mark.parametrize("name", ["qwen3", "mixtral"])
def test_a_batch(model, hand, name: str) -> None:
    folder, reference = model(name)
    s = hand(folder, block_size=4, **BLOCKS)
    lengths = [1, 7, 30, 12]
    for row, length in enumerate(lengths):
        s.enter(row, random_tokens(row, length))
    s.run({0: 1, 2: 11})
    s.run({2: 19, 1: 7, 0: 1, 3: 5})
    s.run({3: 7, 0: 1, 1: 1, 2: 1})
    for _ in range(3):
        s.run(dict.fromkeys(range(4), 1))
    for row in range(4):
        assert worst_error(s, reference, row) < 1e-4


@pytest.mark.parametrize("name", ["qwen3", "mixtral"])
def test_bfloat16(model, hand, name: str) -> None:
    """Loosely: a token may have another expert where two are about as likely."""
    folder, reference = model(name)
    s = hand(folder, dtype="bfloat16", block_size=4, **BLOCKS)
    s.enter(0, random_tokens(5, 30))
    s.run({0: 30})
    s.run({0: 1})
    assert worst_error(s, reference, 0) < 0.2


def test_deterministic_alone_and_together(model, hand) -> None:
    folder, _ = model("qwen3")
    s = hand(folder, deterministic=True, block_size=4, **BLOCKS)
    prompts = [random_tokens(row, 20 + row) for row in range(3)]
    for row, prompt in enumerate(prompts):
        s.enter(row, prompt)
    s.run({row: len(prompt) for row, prompt in enumerate(prompts)})
    for row, prompt in enumerate(prompts):
        s.enter(3 + row, prompt)
        s.run({3 + row: len(prompt)})
        assert torch.equal(s.logits[row, len(prompt)], s.logits[3 + row, len(prompt)])


def test_dummy_weights(model, hand) -> None:
    folder, _ = model("mixtral")
    s = hand(folder, load_format="dummy", seed=3, block_size=4, **BLOCKS)
    s.enter(0, random_tokens(1, 9))
    s.run({0: 9})
    assert s.logits[0, 9].isfinite().all()


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_quantization_is_refused(model, hand, quantization: str) -> None:
    folder, _ = model("mixtral")
    with pytest.raises(ConfigError, match=f"quantization = '{quantization}': a mixture .* 'none'"):
        hand(folder, quantization=quantization)


def test_layers_with_and_without_experts() -> None:
    def check(**changes: object):
        return find_model("Qwen3MoeForCausalLM").check(QWEN3_MOE | changes).experts

    assert check().sparse == (True,) * 4
    assert check(decoder_sparse_step=2).sparse == (False, True, False, True)
    assert check(mlp_only_layers=[0, 2]).sparse == (False, True, False, True)
    assert check(num_experts=None, num_local_experts=9).num == 9
    assert find_model("MixtralForCausalLM").check(MIXTRAL).experts.inner_size == 56


@pytest.mark.parametrize(
    ("name", "changes", "reason"),
    [
        ("qwen3", {"num_experts": 0}, "num_experts must be a positive integer, got 0"),
        ("qwen3", {"num_experts_per_tok": 7}, "num_experts_per_tok must be at most num_experts"),
        ("qwen3", {"moe_intermediate_size": "8"}, "moe_intermediate_size must be a positive"),
        ("qwen3", {"mlp_only_layers": [4]}, "mlp_only_layers must be a list of layers from 0 to 3"),
        ("qwen3", {"decoder_sparse_step": 9}, "leave no layer with experts"),
        ("qwen3", {"shared_expert_intermediate_size": 8}, "shared_expert_intermediate_size 8 is"),
        ("mixtral", {"num_local_experts": True}, "num_local_experts must be a positive integer"),
        ("mixtral", {"n_shared_experts": 1}, "n_shared_experts 1 is not supported"),
    ],
)
def test_what_is_not_supported_is_named(name: str, changes: dict, reason: str) -> None:
    values = MODELS[name] | changes
    with pytest.raises(ModelLoadError, match=f"config.json: .*{reason}|config.json: {reason}"):
        find_model(values["architectures"][0]).check(values)


def test_a_tensor_that_is_missing_is_named(model, hand, tmp_path) -> None:
    from safetensors.torch import load_file, save_file

    folder, _ = model("mixtral")
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.2.block_sparse_moe.experts.4.w3.weight"
    del tensors[name]
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    with pytest.raises(ModelLoadError, match=f"tensor '{name}' is missing"):
        hand(tmp_path)
