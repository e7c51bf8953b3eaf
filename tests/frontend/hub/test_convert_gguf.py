"""The real converter, on GGUF files of tiny random models."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import pytest
import transformers
from numpy.typing import NDArray
from tokenizers import Tokenizer
from tokenizers.pre_tokenizers import ByteLevel

from ringcast.executor import convert_gguf
from ringcast.executor.convert_gguf import (
    BadGgufError,
    Metadata,
    convert,
    llama3_factors,
    make_config,
    open_gguf,
)
from ringcast.frontend.hub import resolve_model
from ringcast.mq.config import EngineConfig
from ringcast.mq.errors import ModelLoadError

HEADS, KV_HEADS, SIZE, HIDDEN, INNER, LAYERS = 4, 2, 8, 32, 48, 2
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TOKENS = [*SPECIALS, *sorted(ByteLevel.alphabet()), "he", "ll"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
WORDS = ["▁", "▁h", "e", "l", "o", "h", "▁he", "ll", "llo", "▁hello"]
GEMMA_TOKENS = ["<pad>", "<eos>", "<bos>", "<unk>", *BYTES, *WORDS]
GEMMA_TYPES = [3] * 4 + [6] * len(BYTES) + [1] * len(WORDS)
TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"

Weights = dict[str, NDArray[np.float32]]


def random_weights(arch: str) -> Weights:
    """A checkpoint's tensors, by GGUF's names: small integers, which bf16 holds exactly."""
    random = np.random.default_rng(0)
    q, kv = HEADS * SIZE, KV_HEADS * SIZE
    tokens = GEMMA_TOKENS if arch == "gemma3" else TOKENS
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (len(tokens), HIDDEN),
        "output_norm.weight": (HIDDEN,),
    }
    for i in range(LAYERS):
        layer: dict[str, tuple[int, ...]] = {
            "attn_norm.weight": (HIDDEN,),
            "attn_q.weight": (q, HIDDEN),
            "attn_k.weight": (kv, HIDDEN),
            "attn_v.weight": (kv, HIDDEN),
            "attn_output.weight": (HIDDEN, q),
            "ffn_norm.weight": (HIDDEN,),
            "ffn_gate.weight": (INNER, HIDDEN),
            "ffn_up.weight": (INNER, HIDDEN),
            "ffn_down.weight": (HIDDEN, INNER),
        }
        if arch == "qwen2":
            layer |= {f"attn_{part}.bias": (n,) for part, n in (("q", q), ("k", kv), ("v", kv))}
        if arch in ("qwen3", "gemma3"):
            layer |= {"attn_q_norm.weight": (SIZE,), "attn_k_norm.weight": (SIZE,)}
        if arch == "gemma3":
            layer |= {"post_attention_norm.weight": (HIDDEN,), "post_ffw_norm.weight": (HIDDEN,)}
        shapes |= {f"blk.{i}.{name}": shape for name, shape in layer.items()}
    return {k: random.integers(-99, 99, s).astype(np.float32) for k, s in shapes.items()}


def interleaved(weights: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """What llama.cpp stores: row 2j of a head is its row j, row 2j + 1 its row SIZE / 2 + j."""
    stored = np.empty_like(weights)
    for head in range(heads):
        for j in range(SIZE // 2):
            stored[head * SIZE + 2 * j] = weights[head * SIZE + j]
            stored[head * SIZE + 2 * j + 1] = weights[head * SIZE + SIZE // 2 + j]
    return stored


def write_gguf(path: Path, arch: str, weights: Weights, **more: Any) -> Path:
    """more: further keys, with __ for the dot and `arch` for the architecture."""
    writer = gguf.GGUFWriter(path, arch)
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_block_count(LAYERS)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(SIZE)
    writer.add_rope_dimension_count(SIZE)
    writer.add_rope_freq_base(5000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    add_gemma_tokenizer(writer) if arch == "gemma3" else add_tokenizer(writer)
    add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    for key, value in more.items():
        name = key.replace("arch__", f"{arch}__").replace("__", ".")
        writer.add_array(name, value) if isinstance(value, list) else add[type(value)](name, value)
    for name, array in weights.items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_tokenizer(writer: gguf.GGUFWriter) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(TOKENS)
    writer.add_token_merges(["h e", "l l"])
    writer.add_token_types([3] * len(SPECIALS) + [1] * (len(TOKENS) - len(SPECIALS)))
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(TEMPLATE)


def add_gemma_tokenizer(writer: gguf.GGUFWriter) -> None:
    writer.add_sliding_window(8)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(GEMMA_TOKENS)
    writer.add_token_scores([-float(i) for i in range(len(GEMMA_TOKENS))])
    writer.add_token_types(GEMMA_TYPES)
    writer.add_bos_token_id(2)
    writer.add_eos_token_id(1)
    writer.add_pad_token_id(0)
    writer.add_unk_token_id(3)
    writer.add_add_bos_token(True)
    writer.add_add_space_prefix(False)


def config_of(path: Path) -> dict[str, Any]:
    reader = open_gguf(path)
    return make_config(Metadata(reader), reader)


# --- the whole way, in its own process ------------------------------------------------------------


def test_model_from_gguf(tmp_path: Path, cache: Path) -> None:
    path = write_gguf(tmp_path / "my model.gguf", "llama", stored_weights("llama"))
    seen: list[tuple[str, int, int]] = []
    spec = resolve_model(EngineConfig(model=str(path)), lambda *args: seen.append(args))
    folder = Path(spec.path)
    assert folder.parent == cache
    assert (spec.vocab_size, spec.max_model_len) == (len(TOKENS), 64)
    assert (spec.bos_token_id, spec.eos_token_ids) == (1, [2])
    total = len(random_weights("llama"))
    assert seen == [("convert", 0, 0), *(("convert", i, total) for i in range(total + 1))]


def test_reason_comes_back_in_one_line(tmp_path: Path, cache: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", "gemma2", {"w": np.ones(4, dtype=np.float32)})
    with pytest.raises(ModelLoadError) as caught:
        resolve_model(EngineConfig(model=str(path)))
    assert str(caught.value) == (
        f"cannot convert {path}: its architecture is gemma2; supported are "
        "llama, qwen2, qwen3, gemma3"
    )
    assert [entry.suffix for entry in cache.iterdir()] == [".lock"]


# --- what is written ------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
def test_weights_and_tokenizer(arch: str, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", arch, stored_weights(arch))
    out = tmp_path / "out"
    out.mkdir()
    convert(path, out, lambda done, total: None)

    assert_weights(out, arch)
    assert (out / "chat_template.jinja").read_text() == TEMPLATE
    generation = json.loads((out / "generation_config.json").read_text())
    assert generation == {"bos_token_id": 1, "eos_token_id": 2}
    tokenizer = Tokenizer.from_file(str(out / "tokenizer.json"))
    encoded = tokenizer.encode("hello<|im_end|>é", add_special_tokens=False).ids
    assert [TOKENS[i] for i in encoded] == ["he", "ll", "o", "<|im_end|>", "Ã", "©"]


def test_gemma3_weights_and_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_gguf(tmp_path / "m.gguf", "gemma3", stored_weights("gemma3"))
    out = tmp_path / "out"
    out.mkdir()
    monkeypatch.setattr(convert_gguf, "_ELEMENTS_AT_ONCE", 100)  # a few rows at a time
    convert(path, out, lambda done, total: None)

    assert_weights(out, "gemma3")
    assert not (out / "chat_template.jinja").exists()
    generation = json.loads((out / "generation_config.json").read_text())
    assert generation == {"bos_token_id": 2, "eos_token_id": 1, "pad_token_id": 0}
    tokenizer = Tokenizer.from_file(str(out / "tokenizer.json"))
    encoded = tokenizer.encode(" hello helé<eos>").ids
    pieces = ["<bos>", "▁hello", "▁he", "l", "<0xC3>", "<0xA9>", "<eos>"]
    assert [GEMMA_TOKENS[i] for i in encoded] == pieces
    assert tokenizer.decode(encoded) == " hello helé"
    assert tokenizer.encode("hello", add_special_tokens=False).tokens == ["h", "e", "llo"]


def test_quantised_weights_some_rows_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(1)
    array = random.standard_normal((7, 64)).astype(np.float32)
    kind = gguf.GGMLQuantizationType.Q8_0
    tensor = SimpleNamespace(
        data=gguf.quantize(array, kind), tensor_type=kind, shape=np.array([64, 7])
    )
    whole = convert_gguf._bf16(tensor, 0.0).float().numpy()
    np.testing.assert_allclose(whole, array, atol=0.03)
    monkeypatch.setattr(convert_gguf, "_ELEMENTS_AT_ONCE", 130)
    np.testing.assert_array_equal(convert_gguf._bf16(tensor, 0.0).float().numpy(), whole)


def assert_weights(out: Path, arch: str) -> None:
    written, expected = read_bf16(out / "model.safetensors"), random_weights(arch)
    assert set(written) == {hf_name(name, arch) for name in expected}
    for name, array in expected.items():
        np.testing.assert_array_equal(written[hf_name(name, arch)], array, err_msg=name)


def read_bf16(path: Path) -> Weights:
    content = path.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    weights = {}
    for name, entry in json.loads(content[8:start]).items():
        if name != "__metadata__":
            assert entry["dtype"] == "BF16"
            first, last = entry["data_offsets"]
            halves = np.frombuffer(content[start + first : start + last], dtype=np.uint16)
            floats = (halves.astype(np.uint32) << 16).view(np.float32)
            weights[name] = floats.reshape(entry["shape"])
    return weights


def stored_weights(arch: str) -> Weights:
    """random_weights as a GGUF file has them."""
    weights = random_weights(arch)
    if arch == "llama":
        for name in weights:
            if "attn_q" in name or "attn_k" in name:
                weights[name] = interleaved(weights[name], HEADS if "attn_q" in name else KV_HEADS)
    if arch == "gemma3":
        for name in weights:
            if name.endswith("norm.weight"):
                weights[name] += 1
    return weights


GEMMA_NAMES = (
    ("post_attention_norm", "post_attention_layernorm"),
    ("ffn_norm", "pre_feedforward_layernorm"),
    ("post_ffw_norm", "post_feedforward_layernorm"),
)


def hf_name(name: str, arch: str) -> str:
    for ours, theirs in (
        *(GEMMA_NAMES if arch == "gemma3" else ()),
        ("token_embd", "model.embed_tokens"),
        ("output_norm", "model.norm"),
        ("blk.", "model.layers."),
        ("attn_norm", "input_layernorm"),
        ("attn_output", "self_attn.o_proj"),
        ("attn_q_norm", "self_attn.q_norm"),
        ("attn_k_norm", "self_attn.k_norm"),
        ("attn_q", "self_attn.q_proj"),
        ("attn_k", "self_attn.k_proj"),
        ("attn_v", "self_attn.v_proj"),
        ("ffn_norm", "post_attention_layernorm"),
        ("ffn_", "mlp."),
        ("gate.", "gate_proj."),
        ("up.", "up_proj."),
        ("down.", "down_proj."),
    ):
        name = name.replace(ours, theirs)
    return name


# --- config ---------------------------------------------------------------------------------------


def test_config(tmp_path: Path) -> None:
    config = config_of(write_gguf(tmp_path / "m.gguf", "qwen2", random_weights("qwen2")))
    assert config == {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "dtype": "bfloat16",
        "vocab_size": len(TOKENS),
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": SIZE,
        "hidden_act": "silu",
        "rms_norm_eps": pytest.approx(1e-5),
        "max_position_embeddings": 64,
        "rope_theta": 5000.0,
        "rope_scaling": None,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def test_gemma3_config(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", "gemma3", random_weights("gemma3"))
    config = config_of(path)
    sliding, full = "sliding_attention", "full_attention"
    assert config == {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "dtype": "bfloat16",
        "vocab_size": len(GEMMA_TOKENS),
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": SIZE,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": SIZE,
        "sliding_window": 8,
        "sliding_window_pattern": 6,
        "layer_types": [sliding] * LAYERS,
        "rms_norm_eps": pytest.approx(1e-5),
        "max_position_embeddings": 64,
        "rope_theta": 5000.0,
        "rope_local_base_freq": 10000.0,
        "rope_scaling": None,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "bos_token_id": 2,
        "eos_token_id": 1,
        "pad_token_id": 0,
    }
    read = transformers.AutoConfig.for_model(**config)
    assert read.rope_parameters[full]["rope_theta"] == 5000.0
    assert read.rope_parameters[sliding]["rope_theta"] == 10000.0

    more = {
        "arch__attention__sliding_window_pattern": 2,
        "arch__rope__freq_base_swa": 700.0,
        "arch__rope__scaling__type": "linear",
        "arch__rope__scaling__factor": 8.0,
    }
    config = config_of(write_gguf(tmp_path / "b.gguf", "gemma3", random_weights("gemma3"), **more))
    assert (config["layer_types"], config["rope_local_base_freq"]) == ([sliding, full], 700.0)
    read = transformers.AutoConfig.for_model(**config)
    kept = {key: read.rope_parameters[full][key] for key in ("rope_type", "factor", "rope_theta")}
    assert kept == {"rope_type": "linear", "factor": 8.0, "rope_theta": 5000.0}
    assert "factor" not in read.rope_parameters[sliding]


def test_end_of_turn_is_an_eos_too(tmp_path: Path) -> None:
    more = {"tokenizer__ggml__eot_token_id": 0, "tokenizer__ggml__padding_token_id": 2}
    config = config_of(write_gguf(tmp_path / "m.gguf", "llama", random_weights("llama"), **more))
    assert (config["eos_token_id"], config["pad_token_id"]) == ([2, 0], 2)


def test_rope_scaling_by_keys(tmp_path: Path) -> None:
    more = {
        "arch__rope__scaling__type": "yarn",
        "arch__rope__scaling__factor": 4.0,
        "arch__rope__scaling__original_context_length": 16,
    }
    config = config_of(write_gguf(tmp_path / "m.gguf", "qwen2", random_weights("qwen2"), **more))
    expected = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
    assert config["rope_scaling"] == expected


def test_llama3_scaling_from_its_factors(tmp_path: Path) -> None:
    llama3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "factor": 32.0}
    llama3["original_max_position_embeddings"] = 8192
    weights, more = random_weights("llama"), {"arch__rope__freq_base": 500000.0}
    metadata = Metadata(open_gguf(write_gguf(tmp_path / "a.gguf", "llama", weights, **more)))
    factors = llama3_factors(metadata, llama3).astype(np.float32)
    assert (factors[0], factors[-1]) == (1.0, 32.0)
    weights["rope_freqs.weight"] = factors
    config = config_of(write_gguf(tmp_path / "b.gguf", "llama", weights, **more))
    assert config["rope_scaling"] == {"rope_type": "llama3", **llama3}

    weights["rope_freqs.weight"] = factors[::-1].copy()
    with pytest.raises(BadGgufError, match="not those of llama-3 scaling"):
        config_of(write_gguf(tmp_path / "c.gguf", "llama", weights, **more))


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"arch__expert_count": 8}, "mixture of experts"),
        ({"split__count": 3}, "one of 3 parts; merge them first"),
        ({"arch__rope__scaling__type": "longrope"}, "its RoPE scaling is longrope; supported"),
        ({"arch__attention__head_count_kv": [2, 1]}, "differs from layer to layer"),
    ],
)
def test_what_is_not_supported(tmp_path: Path, more: dict[str, Any], reason: str) -> None:
    with pytest.raises(BadGgufError, match=reason):
        config_of(write_gguf(tmp_path / "m.gguf", "llama", random_weights("llama"), **more))


# --- files that are not whole ---------------------------------------------------------------------


def test_truncated_anywhere(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", "llama", random_weights("llama"))
    whole = path.read_bytes()
    open_gguf(path)
    for length in (5, 20, 100, 1000, len(whole) // 2, len(whole) - 40):
        path.write_bytes(whole[:length])
        with pytest.raises(BadGgufError, match="truncated or damaged"):
            open_gguf(path)


@pytest.mark.parametrize("content", [b"", b"GG", b"\x89PNG and so on"])
def test_foreign_file(tmp_path: Path, cache: Path, content: bytes) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    with pytest.raises(BadGgufError, match="not b'GGUF'"):
        open_gguf(path)
    with pytest.raises(ModelLoadError, match=r"m\.gguf is not a GGUF file: it begins with b'"):
        resolve_model(EngineConfig(model=str(path)))
    assert not cache.exists()


@pytest.mark.parametrize("name", ["w", "other.weight", "blk.0.ssm_in.weight", "blk.weight"])
def test_tensor_of_unknown_use(name: str) -> None:
    with pytest.raises(BadGgufError, match=f"holds a tensor of unknown use, {name}"):
        convert_gguf.hf_name(name, convert_gguf.layer_names("llama"))


def test_missing_tensor(tmp_path: Path, cache: Path) -> None:
    weights = random_weights("llama")
    del weights["blk.1.ffn_up.weight"]
    path = write_gguf(tmp_path / "m.gguf", "llama", weights)
    expected = r"1 tensors are missing, model\.layers\.1\.mlp\.up_proj\.weight among them"
    with pytest.raises(ModelLoadError, match=expected):
        resolve_model(EngineConfig(model=str(path)))


@pytest.mark.parametrize("part", ["attn_q_norm", "post_attention_norm", "post_ffw_norm"])
def test_missing_norm_of_gemma3(tmp_path: Path, part: str) -> None:
    weights = random_weights("gemma3")
    del weights[f"blk.0.{part}.weight"]
    path = write_gguf(tmp_path / "m.gguf", "gemma3", weights)
    with pytest.raises(BadGgufError, match=r"1 tensors are missing, model\.layers\.0\."):
        convert(path, tmp_path / "out", lambda done, total: None)


# --- once, until the file changes -----------------------------------------------------------------


def test_converted_once_until_the_file_changes(world: Any, tmp_path: Path, cache: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(world.gguf)
    first = resolve_model(EngineConfig(model=str(path)))
    assert resolve_model(EngineConfig(model=str(path))) == first
    assert len(world.calls("convert")) == 1
    marker = json.loads((Path(first.path) / "ringcast.json").read_text())
    assert marker["source"]["origin"] == str(path)

    path.write_bytes(world.gguf)
    assert resolve_model(EngineConfig(model=str(path))) == first
    assert len(world.calls("convert")) == 2
    assert [entry.name for entry in cache.iterdir() if entry.is_dir()] == [Path(first.path).name]


def test_files_of_one_name_do_not_meet(world: Any, tmp_path: Path) -> None:
    paths = [tmp_path / "a" / "m.gguf", tmp_path / "b" / "m.gguf"]
    for path in paths:
        path.parent.mkdir()
        path.write_bytes(world.gguf)
    folders = {resolve_model(EngineConfig(model=str(path))).path for path in paths}
    assert len(folders) == 2
