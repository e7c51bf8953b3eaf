"""Small random models of every family through the runner, against transformers."""

from __future__ import annotations

import copy
from functools import cache
from pathlib import Path

import pytest
import torch
import transformers

from ringcast.executor.cpu_runner import choose_dtype
from ringcast.kernels.cpu import blocks, tiles, vectors

SHAPE = {
    "vocab_size": 101,
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 100.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 100.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}
GEMMA3 = {
    "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "sliding_window": 9,
    "query_pre_attn_scalar": 20,
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "rope_theta": 900.0, "factor": 2.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
    },
}
# name -> config class, changes to SHAPE
MODELS: dict[str, tuple[str, dict[str, object]]] = {
    "llama": ("Llama", {}),
    "llama-tied-biased": (
        "Llama",
        {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True, "head_dim": 10},
    ),
    "llama-one-head-each": (
        "Llama",
        {"num_attention_heads": 3, "num_key_value_heads": 3, "num_hidden_layers": 3},
    ),
    "llama-linear": (
        "Llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 100.0, "factor": 3.0}},
    ),
    "llama-llama3": ("Llama", {"rope_parameters": LLAMA3}),
    "llama-yarn": ("Llama", {"rope_parameters": YARN}),
    "mistral-window": ("Mistral", {"sliding_window": 11}),
    "mistral": ("Mistral", {"sliding_window": None, "head_dim": 16}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2-window": (
        "Qwen2",
        {
            "use_sliding_window": True,
            "sliding_window": 13,
            "max_window_layers": 1,
            "num_key_value_heads": 1,
        },
    ),
    "qwen3": ("Qwen3", {"head_dim": 14, "num_attention_heads": 5, "num_key_value_heads": 1}),
    "gemma3": ("Gemma3", {**GEMMA3, "head_dim": 10, "num_key_value_heads": 1}),
    # As wide as matrix tiles need it.
    "gemma3-wide": ("Gemma3", {**GEMMA3, "head_dim": 32}),
    "llama-wide": ("Llama", {"head_dim": 32, "tie_word_embeddings": True, "attention_bias": True}),
    "qwen3-wide": ("Qwen3", {"head_dim": 64, "num_attention_heads": 6, "num_key_value_heads": 2}),
    "mistral-wide": ("Mistral", {"head_dim": 32, "sliding_window": 20}),
}
needs_tiles = pytest.mark.skipif(not tiles.available(), reason="this processor has no matrix tiles")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """model(name) -> its folder and transformers' float32 model."""

    @cache
    def make(name: str) -> tuple[Path, torch.nn.Module]:
        family, changes = MODELS[name]
        torch.manual_seed(len(name))
        kind = "Gemma3Text" if family == "Gemma3" else family
        config = getattr(transformers, f"{kind}Config")(**(SHAPE | changes))
        made = (
            getattr(transformers, f"{family}ForCausalLM")
            ._from_config(config, attn_implementation="eager")
            .eval()
        )
        for parameter in made.parameters():
            torch.nn.init.normal_(parameter, 1.0 if parameter.dim() == 1 else 0.0, 0.15)
        made.tie_weights()
        folder = tmp_path_factory.mktemp(name)
        made.save_pretrained(folder)
        return folder, made

    return make


def random_tokens(seed: int, length: int) -> list[int]:
    return torch.randint(3, 101, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@torch.no_grad()
def check(scheduler, reference, rows, tolerance: float = 1e-4) -> None:
    """All logits of these rows, and that there are any."""
    for row in rows:
        expected = reference(torch.tensor([scheduler.known[row]])).logits[0].float()
        mine = {position: logits for (r, position), logits in scheduler.logits.items() if r == row}
        assert mine
        for position, logits in mine.items():
            error = (logits - expected[position - 1]).abs().max() / expected[
                position - 1
            ].abs().max()
            assert error < tolerance, f"row {row}, position {position}: {error}"


@pytest.mark.parametrize("name", MODELS)
def test_prefill_chunks_and_decode_together(name, model, hand):
    folder, reference = model(name)
    s = hand(folder, block_size=8, max_num_batched_tokens=64)
    s.enter(3, random_tokens(1, 40))
    s.run({3: 40})
    s.enter(0, random_tokens(2, 37))
    s.enter(5, random_tokens(3, 1))
    s.run({0: 10, 3: 1, 5: 1})  # a chunk, a decode step, a prompt of one token
    s.run({5: 1, 0: 1, 3: 1})  # another order; a chunk of one token is not sampled
    assert (0, 11) not in s.logits
    s.run({3: 1, 0: 26, 5: 1})
    for _ in range(3):
        s.run({0: 1, 3: 1, 5: 1})
    assert [len(s.known[row]) for row in (0, 3, 5)] == [41, 47, 7]
    check(s, reference, [0, 3, 5])


@needs_tiles
@pytest.mark.parametrize(
    "name",
    ["llama-wide", "qwen3-wide", "mistral-wide", "gemma3-wide", "llama-tied-biased", "qwen2"],
)
def test_bfloat16(name, model, hand):
    folder, reference = model(name)
    s = hand(folder, dtype="bfloat16", max_num_batched_tokens=64)
    assert s.runner.details()["attention"] == ("tiles" if name.endswith("wide") else "portable")
    s.enter(3, random_tokens(1, 40))
    s.run({3: 40})
    s.enter(0, random_tokens(2, 37))
    s.run({0: 10, 3: 1})
    s.run({0: 27, 3: 1})
    for _ in range(3):
        s.run({0: 1, 3: 1})
    # Gemma's test model has three layers, not two, and a larger residual stream.
    check(s, reference, [0, 3], tolerance=0.1 if name == "gemma3-wide" else 0.06)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_without_tiles(dtype, model, hand, monkeypatch):
    monkeypatch.setattr(tiles, "available", lambda: False)
    monkeypatch.setattr(blocks, "available", lambda: False)
    folder, reference = model("llama-tied-biased")
    s = hand(folder, dtype=dtype)
    assert s.runner.details()["linear"].startswith("rows")
    s.enter(1, random_tokens(4, 30))
    s.run({1: 30})
    s.run({1: 1})
    check(s, reference, [1], tolerance=0.06 if dtype == "bfloat16" else 0.01)


@pytest.mark.skipif(not blocks.available(), reason="this processor has no AVX2")
@pytest.mark.parametrize("name", ["llama-tied-biased", "llama-wide", "qwen3", "gemma3-wide"])
def test_bfloat16_weights_are_widened(name, model, hand, monkeypatch):
    """Beside them and the cache all is float32, so with a cache of float32 the logits are those of
    the rounded weights.
    """
    monkeypatch.setattr(tiles, "available", lambda: False)
    monkeypatch.setattr(vectors, "bfloat16_available", lambda: False)
    folder, original = model(name)
    reference = copy.deepcopy(original)
    for parameter in reference.parameters():
        if parameter.dim() == 2:  # norms and biases stay float32
            parameter.data = parameter.data.bfloat16().float()
    if name == "gemma3-wide":  # whose embedding's scale has the weights' type
        embedding = reference.get_input_embeddings()
        embedding.embed_scale = embedding.embed_scale.bfloat16().float()
    whole = hand(folder).runner.details()
    for cache_dtype, share, tolerance in (("float32", 1, 1e-4), ("auto", 2, 0.06)):
        s = hand(folder, dtype="bfloat16", kv_cache_dtype=cache_dtype)
        details = s.runner.details()
        attention = "vectors" if name.endswith("wide") else "portable"
        assert (details["dtype"], details["attention"]) == ("bfloat16", attention)
        assert details["linear"] == "bfloat16 weights, widened in vectors (AVX2)"
        assert details["kv_cache_dtype"] == ("bfloat16" if share == 2 else "float32")
        assert details["kv_cache_bytes"] * share == whole["kv_cache_bytes"]
        s.enter(3, random_tokens(1, 40))
        s.run({3: 40})
        s.enter(0, random_tokens(2, 37))
        s.run({0: 10, 3: 1})
        s.run({0: 27, 3: 1})
        s.run({0: 1, 3: 1})
        check(s, reference, [0, 3], tolerance=tolerance)


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_a_cache_of_another_type_than_the_models(name, model, hand):
    folder, reference = model("qwen3-wide")
    s = hand(folder, kv_cache_dtype=name)
    details = s.runner.details()
    assert (details["dtype"], details["kv_cache_dtype"]) == ("float32", name)
    assert details["kv_cache_bytes"] * 2 == hand(folder).runner.details()["kv_cache_bytes"]
    s.enter(1, random_tokens(4, 30))
    s.run({1: 30})
    s.run({1: 1})
    check(s, reference, [1], tolerance=0.03 if name == "bfloat16" else 0.004)
    with pytest.raises(AssertionError):  # but it isn't a cache of float32
        check(s, reference, [1])


def test_the_type_that_auto_means(monkeypatch):
    monkeypatch.setattr(vectors, "bfloat16_available", lambda: True)
    assert choose_dtype("auto") == torch.bfloat16
    assert choose_dtype("float16") == torch.float16
    monkeypatch.setattr(vectors, "bfloat16_available", lambda: False)
    for avx2, dtype in ((True, torch.bfloat16), (False, torch.float32)):
        monkeypatch.setattr(blocks, "available", lambda avx2=avx2: avx2)
        assert choose_dtype("auto") == dtype


def test_rows_share_the_blocks_of_a_prefix(model, hand):
    folder, reference = model("llama")
    s = hand(folder, block_size=8)
    prefix = random_tokens(5, 16)
    s.enter(1, prefix + random_tokens(6, 5))
    s.run({1: 21})
    s.enter(2, prefix + random_tokens(7, 9), computed=16, blocks=s.blocks[1][:2])
    s.run({2: 9, 1: 1})
    s.run({2: 1, 1: 1})
    assert s.blocks[1][:2] == s.blocks[2][:2]
    check(s, reference, [1, 2])


def test_a_fork_copies_its_partial_block(model, hand):
    folder, reference = model("qwen3")
    s = hand(folder, block_size=8)
    prompt = random_tokens(8, 20)
    s.enter(1, prompt)
    s.run({1: 20})
    forked = [*s.blocks[1][:2], s.copy(s.blocks[1][2])]
    s.enter(2, [*prompt, 17], computed=20, blocks=forked)
    for _ in range(6):
        s.run({1: 1, 2: 1})
    assert s.known[1] != s.known[2]
    check(s, reference, [1, 2])


def test_a_row_is_given_out_again(model, hand):
    folder, reference = model("llama-one-head-each")
    s = hand(folder)
    s.enter(4, random_tokens(9, 60))
    s.run({4: 60})
    s.remove(4)
    s.logits.clear()
    s.enter(4, random_tokens(10, 5))
    s.run({4: 5})
    s.run({4: 1})
    check(s, reference, [4])


def test_a_preempted_sequence_comes_back_with_its_outputs(model, hand):
    folder, reference = model("llama")
    s = hand(folder)
    s.enter(0, random_tokens(11, 12))
    s.run({0: 12})
    for _ in range(4):
        s.run({0: 1})
    known = s.known[0]
    s.remove(0)
    s.enter(6, known)
    s.run({6: len(known)})
    check(s, reference, [6])


def test_a_full_batch_takes_the_path_for_many_rows(model, hand):
    folder, reference = model("llama")
    s = hand(folder)
    rows = range(8)
    for row in rows:
        s.enter(row, random_tokens(row, 3 + row))
    s.run({row: 3 + row for row in rows})
    for _ in range(2):
        s.run(dict.fromkeys(rows, 1))
    check(s, reference, rows)


def test_an_empty_plan_only_updates_the_batch(model, hand):
    folder, reference = model("llama")
    s = hand(folder)
    s.enter(0, random_tokens(12, 6))
    output = s.run({})
    assert output.rows == output.token_ids == b""
    s.run({0: 6})
    check(s, reference, [0])


def test_the_context_can_be_filled_to_its_last_token(model, hand):
    folder, reference = model("llama")
    s = hand(folder, max_model_len=32)
    s.enter(0, random_tokens(13, 30))
    s.run({0: 30})
    s.run({0: 1})
    s.run({0: 1})
    assert len(s.known[0]) == 33
    check(s, reference, [0])


def test_dynamic_rope_is_made_for_the_longest_sequence(tmp_path, hand):
    torch.manual_seed(1)
    rope = {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 2.0}
    config = transformers.LlamaConfig(
        **(SHAPE | {"max_position_embeddings": 16, "rope_parameters": rope})
    )
    reference = transformers.LlamaForCausalLM(config).eval()
    reference.save_pretrained(tmp_path)
    s = hand(tmp_path, max_model_len=40)
    s.enter(0, random_tokens(14, 39))
    s.run({0: 39})
    check(s, reference, [0])  # the reference sees 40 tokens: the longest sequence
    short = hand(tmp_path, max_model_len=16)
    short.enter(0, random_tokens(15, 12))
    short.run({0: 12})
    check(short, reference, [0])


def test_details_say_what_was_chosen(model, hand):
    folder, reference = model("llama")
    details = hand(folder, block_size=4).runner.details()
    assert details["dtype"] == "float32"
    assert details["num_blocks"] == 200
    assert details["threads"] == 2
    assert details["kv_cache_bytes"] == 200 * 4 * 2 * 2 * 2 * 8 * 4
    matrices = sum(p.numel() for p in reference.parameters() if p.dim() == 2)
    assert details["weights_bytes"] == matrices * 4


def test_dummy_weights_are_the_same_for_the_same_seed(model, hand):
    folder, _ = model("qwen2")

    def first_logits(seed: int) -> torch.Tensor:
        s = hand(folder, load_format="dummy", seed=seed)
        s.enter(0, random_tokens(16, 4))
        s.run({0: 4})
        return s.logits[0, 4]

    assert torch.equal(first_logits(1), first_logits(1))
    assert not torch.equal(first_logits(1), first_logits(2))
