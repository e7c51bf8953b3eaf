"""Gemma 3 on small random weights: its windows, its config's two layouts, what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from ringcast.executor.models.gemma3 import GEMMA3
from ringcast.mq.errors import ModelLoadError

WINDOW = 8
SHAPE = {
    "vocab_size": 90,
    "hidden_size": 40,
    "intermediate_size": 56,
    "num_hidden_layers": 7,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "sliding_window": WINDOW,
    "query_pre_attn_scalar": 24,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}

BLOCKS = {"num_gpu_blocks_override": 600}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, torch.nn.Module]:
    torch.manual_seed(3)
    config = transformers.Gemma3TextConfig(**SHAPE)
    made = transformers.Gemma3ForCausalLM._from_config(config, attn_implementation="eager").eval()
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, 0.0, 0.2)
    made.tie_weights()
    folder = tmp_path_factory.mktemp("gemma3")
    made.save_pretrained(folder)
    return folder, made


def random_tokens(seed: int, length: int) -> list[int]:
    return torch.randint(3, 90, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@torch.no_grad()
def check(scheduler, reference: torch.nn.Module, row: int) -> None:
    expected = reference(torch.tensor([scheduler.known[row]])).logits[0]
    mine = {position: logits for (r, position), logits in scheduler.logits.items() if r == row}
    assert mine
    for position, logits in mine.items():
        wanted = expected[position - 1]
        error = (logits - wanted).abs().max() / wanted.abs().max()
        assert error < 1e-4, f"row {row}, position {position}: {error}"


@pytest.mark.parametrize("length", [1, WINDOW - 1, WINDOW, WINDOW + 1, 3 * WINDOW, 11 * WINDOW + 3])
@pytest.mark.parametrize("chunk", [5, 16, 200])
def test_prompts_below_and_beyond_the_windows(model, hand, length: int, chunk: int) -> None:
    folder, reference = model
    s = hand(folder, block_size=4, max_num_batched_tokens=256, **BLOCKS)
    s.enter(2, random_tokens(length, length))
    for start in range(0, length, chunk):
        s.run({2: min(chunk, length - start)})
    for _ in range(WINDOW + 2):
        s.run({2: 1})
    assert len(s.known[2]) == length + WINDOW + 3
    check(s, reference, 2)


def test_the_windows_matter(model, hand) -> None:
    folder, reference = model
    prompt = random_tokens(1, 60)
    s = hand(folder, block_size=4, **BLOCKS)
    s.enter(0, prompt)
    s.run({0: 60})
    check(s, reference, 0)
    config = transformers.Gemma3TextConfig(**(SHAPE | {"sliding_window": 200}))
    without = transformers.Gemma3ForCausalLM._from_config(config, attn_implementation="eager")
    without.load_state_dict(reference.state_dict())
    with torch.no_grad():
        other = without.eval()(torch.tensor([prompt])).logits[0, -1]
    assert (s.logits[0, 60] - other).abs().max() > 1e-2


def test_cached_blocks_of_a_prefix_beyond_several_windows(model, hand) -> None:
    folder, reference = model
    s = hand(folder, block_size=4, **BLOCKS)
    prefix = random_tokens(5, 40)
    s.enter(1, prefix + random_tokens(6, 9))
    s.run({1: 49})
    groups = 7  # one layer each
    assert s.groups == groups
    shared = s.blocks[1][: 10 * groups]
    for i in range(8 * groups):  # the token at 40 sees those from 33 on, behind block 8's begin
        if i % groups:  # the first group has full attention
            shared[i] = 0
    with torch.inference_mode():
        s.runner._attention._cache[:, :, 0] = float("nan")
    s.enter(3, prefix + random_tokens(7, 30), computed=40, blocks=shared)
    s.run({3: 13, 1: 1})
    s.run({3: 17, 1: 1})
    s.run({3: 1, 1: 1})
    check(s, reference, 1)
    check(s, reference, 3)


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_quantised_weights_answer_alike(model, hand, quantization: str) -> None:
    folder, reference = model
    s = hand(folder, quantization=quantization, **BLOCKS)
    s.enter(0, random_tokens(8, 30))
    s.run({0: 30})
    with torch.no_grad():
        expected = reference(torch.tensor([s.known[0][:30]])).logits[0, -1]
    likeness = torch.cosine_similarity(s.logits[0, 30], expected, dim=0)
    assert likeness > (0.99 if quantization == "int8" else 0.9)


def test_the_config_s_older_layout_says_the_same() -> None:
    scaling = {"rope_type": "linear", "factor": 8.0}
    kinds = ["sliding_attention", "sliding_attention", "full_attention"] * 2
    common = {**SHAPE, "num_hidden_layers": 6, "hidden_activation": "gelu_pytorch_tanh"}
    older = GEMMA3.check(
        {
            **common,
            "rope_theta": 5e5,
            "rope_local_base_freq": 2e4,
            "rope_scaling": scaling,
            "sliding_window_pattern": 3,
        }
    )
    newer = GEMMA3.check(
        {
            **common,
            "layer_types": kinds,
            "rope_parameters": {
                "full_attention": {"rope_theta": 5e5, **scaling},
                "sliding_attention": {"rope_theta": 2e4, "rope_type": "default"},
            },
        }
    )
    assert older.windows == newer.windows == [WINDOW, WINDOW, 0] * 2
    assert older.rope_of == newer.rope_of == [1, 1, 0] * 2
    for one, other in zip(older.ropes, newer.ropes, strict=True):
        assert (one.kind, one.theta) == (other.kind, other.theta)
    assert [(rope.kind, rope.theta) for rope in older.ropes] == [("linear", 5e5), ("default", 2e4)]
    assert older.ropes[0].number("factor") == 8.0
    assert older.tied


def test_what_config_json_leaves_unsaid() -> None:
    shape = {k: v for k, v in SHAPE.items() if k not in ("head_dim", "query_pre_attn_scalar")}
    config = GEMMA3.check(shape)
    assert (config.head_size, config.attention_scale) == (256, 1 / 16)
    assert config.windows == [WINDOW] * 5 + [0, WINDOW]
    assert [(rope.kind, rope.theta) for rope in config.ropes] == [
        ("default", 1e6),
        ("default", 1e4),
    ]


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("final_logit_softcapping", 30.0, "final_logit_softcapping 30.0 is not supported"),
        ("attn_logit_softcapping", 50.0, "attn_logit_softcapping 50.0 is not supported"),
        ("use_bidirectional_attention", True, "use_bidirectional_attention True is not"),
        ("hidden_activation", "silu", "hidden_activation 'silu' is not supported; 'gelu_py"),
        ("query_pre_attn_scalar", 0, "query_pre_attn_scalar must be a positive number, got 0"),
        ("layer_types", ["full_attention"], "layer_types must name one of 'sliding_attention'"),
        ("layer_types", ["chunked_attention"] * 7, "for each of 7 layers"),
    ],
)
def test_what_is_not_supported_is_named(name: str, value: object, reason: str) -> None:
    with pytest.raises(ModelLoadError, match=f"config.json: .*{reason}|config.json: {reason}"):
        GEMMA3.check({**SHAPE, name: value})
