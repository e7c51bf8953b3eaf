"""GGUF to a folder that the engine reads: `python -m ringcast.executor.convert_gguf SRC OUT`.

Runs as a process of its own, because it needs torch and transformers and its caller has neither.
It writes bf16 safetensors, config.json, generation_config.json, tokenizer.json and the chat
template. What it says:

    stdout   `progress DONE TOTAL`, in tensors
    stderr   on failure one last line with the reason, and exit status 1

Weights and config are read with the gguf library alone; the tokenizer is rebuilt by transformers.
What a GGUF has otherwise than the original checkpoint:

    llama    the rows of attn_q and attn_k are permuted from two halves to interleaved pairs (RoPE's
             other convention), and llama-3 RoPE scaling is a tensor of factors, not parameters
    gemma3   the weights of norms have 1 added, and the keys leave out what is the same in every
             Gemma 3 (llama.cpp has it in its code)
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

OnTensor = Callable[[int, int], None]


class BadGgufError(Exception):
    """The file is no GGUF, is not whole, or holds a model of a kind that isn't known here."""


ARCHITECTURES = {
    "llama": ("LlamaForCausalLM", "llama"),
    "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
    "gemma3": ("Gemma3ForCausalLM", "gemma3_text"),
}
_TOP = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER_GEMMA3 = _LAYER | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_ROPE_FACTORS = "rope_freqs.weight"
_ELEMENTS_AT_ONCE = 8 << 20


def convert(source: Path, out: Path, on_tensor: OnTensor) -> None:
    """Write the model in `source` to the folder `out`, dequantised. Raises BadGgufError."""
    reader = open_gguf(source)
    metadata = Metadata(reader)
    config = make_config(metadata, reader)
    layer = layer_names(metadata.architecture)
    names = {tensor.name: hf_name(tensor.name, layer) for tensor in reader.tensors}
    _require_all(set(names.values()), layer, config)
    _write_json(out / "config.json", config)
    tokens = {key: config[key] for key in config if key.endswith("token_id")}
    _write_json(out / "generation_config.json", tokens)
    _write_tokenizer(source, out)
    _write_weights(reader, names, config, out, on_tensor)


def open_gguf(source: Path) -> Any:
    """The file's gguf.GGUFReader. Raises BadGgufError for what is foreign or truncated."""
    with source.open("rb") as file:
        magic = file.read(4)
    if magic != b"GGUF":
        raise BadGgufError(f"it begins with {magic!r}, not b'GGUF'")
    import gguf

    try:
        reader = gguf.GGUFReader(source)
    except (ValueError, IndexError, KeyError, UnicodeDecodeError) as error:
        raise BadGgufError(f"the file is truncated or damaged ({error})") from error
    if not reader.tensors:
        raise BadGgufError("the file holds no tensors")
    return reader


class Metadata:
    """The file's key-value pairs. `arch` keys are looked up without their prefix."""

    def __init__(self, reader: Any) -> None:
        self._fields = reader.fields
        self.architecture = str(self.get("general.architecture"))
        if self.architecture not in ARCHITECTURES:
            raise BadGgufError(
                f"its architecture is {self.architecture}; supported are {', '.join(ARCHITECTURES)}"
            )
        parts = self.get("split.count", 1)
        if parts > 1:
            raise BadGgufError(f"it is one of {parts} parts; merge them first (llama-gguf-split)")
        if self.arch("expert_count", 0):
            raise BadGgufError("it is a mixture of experts, which is not supported")

    def get(self, key: str, default: Any = ...) -> Any:
        """A number or a string. Without a default, a missing key raises BadGgufError."""
        if key not in self._fields:
            if default is ...:
                raise BadGgufError(f"it has no {key}")
            return default
        field = self._fields[key]
        if len(field.data) != 1:
            raise BadGgufError(f"{key} differs from layer to layer, which is not supported")
        part = field.parts[field.data[0]]
        return bytes(part).decode() if field.types[0].name == "STRING" else part[0].item()

    def arch(self, key: str, default: Any = ...) -> Any:
        return self.get(f"{self.architecture}.{key}", default)


def make_config(metadata: Metadata, reader: Any) -> dict[str, Any]:
    """config.json as transformers writes it for this model."""
    names = {tensor.name for tensor in reader.tensors}
    heads, hidden = metadata.arch("attention.head_count"), metadata.arch("embedding_length")
    rows = {t.name: int(t.shape[-1]) for t in reader.tensors}
    if "token_embd.weight" not in rows:
        raise BadGgufError("it has no token_embd.weight")
    class_name, model_type = ARCHITECTURES[metadata.architecture]
    config: dict[str, Any] = {
        "architectures": [class_name],
        "model_type": model_type,
        "dtype": "bfloat16",
        "vocab_size": rows["token_embd.weight"],
        "hidden_size": hidden,
        "intermediate_size": metadata.arch("feed_forward_length"),
        "num_hidden_layers": metadata.arch("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.arch("attention.head_count_kv", heads),
        "head_dim": metadata.arch("attention.key_length", hidden // heads),
        "rms_norm_eps": metadata.arch("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": metadata.arch("context_length"),
        "rope_theta": metadata.arch("rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(metadata, reader),
        "attention_bias": "blk.0.attn_output.bias" in names,
        "mlp_bias": "blk.0.ffn_down.bias" in names,
        "tie_word_embeddings": "output.weight" not in names,
    }
    own = _gemma3(metadata, config) if metadata.architecture == "gemma3" else {"hidden_act": "silu"}
    return config | own | _special_tokens(metadata)


def _gemma3(metadata: Metadata, config: dict[str, Any]) -> dict[str, Any]:
    """What is Gemma 3's own, in the layout that transformers 4 and 5 both read."""
    head_dim, heads = config["head_dim"], config["num_attention_heads"]
    is_27b = config["num_hidden_layers"] == 62
    pattern = metadata.arch("attention.sliding_window_pattern", 6)
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": config["hidden_size"] // heads if is_27b else head_dim,
        "sliding_window": metadata.arch("attention.sliding_window"),
        "sliding_window_pattern": pattern,
        "layer_types": [
            "sliding_attention" if (i + 1) % pattern else "full_attention"
            for i in range(config["num_hidden_layers"])
        ],
        "rope_theta": metadata.arch("rope.freq_base", 1e6),
        "rope_local_base_freq": metadata.arch("rope.freq_base_swa", 1e4),
        "attn_logit_softcapping": metadata.arch("attn_logit_softcapping", None),
        "final_logit_softcapping": metadata.arch("final_logit_softcapping", None),
    }


def _special_tokens(metadata: Metadata) -> dict[str, Any]:
    ids = {
        f"{name}_token_id": metadata.get(f"tokenizer.ggml.{key}_token_id", None)
        for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"))
    }
    end_of_turn = metadata.get("tokenizer.ggml.eot_token_id", None)
    if end_of_turn is not None and end_of_turn != ids["eos_token_id"]:
        ids["eos_token_id"] = [i for i in (ids["eos_token_id"], end_of_turn) if i is not None]
    return {name: value for name, value in ids.items() if value is not None}


def _rope_scaling(metadata: Metadata, reader: Any) -> dict[str, Any] | None:
    for tensor in reader.tensors:
        if tensor.name == _ROPE_FACTORS:
            return _llama3_scaling(metadata, np.asarray(tensor.data, dtype=np.float64))
    kind = metadata.arch("rope.scaling.type", "none")
    if kind == "none":
        return None
    if kind not in ("linear", "yarn"):
        raise BadGgufError(f"its RoPE scaling is {kind}; supported are linear, yarn and llama3")
    scaling = {"rope_type": kind, "factor": metadata.arch("rope.scaling.factor")}
    original = metadata.arch("rope.scaling.original_context_length", None)
    return scaling if original is None else scaling | {"original_max_position_embeddings": original}


def _llama3_scaling(metadata: Metadata, factors: Any) -> dict[str, Any]:
    """The parameters behind a tensor of factors: all llama-3 models differ in `factor` alone."""
    scaling = {
        "rope_type": "llama3",
        "factor": round(float(factors.max()), 3),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    if not np.allclose(factors, llama3_factors(metadata, scaling), rtol=1e-3):
        raise BadGgufError(f"its {_ROPE_FACTORS} are not those of llama-3 scaling")
    return scaling


def llama3_factors(metadata: Metadata, scaling: dict[str, Any]) -> Any:
    """What each RoPE frequency is divided by, shape [head size / 2]."""
    base = metadata.arch("rope.freq_base", 10000.0)
    size = metadata.arch("rope.dimension_count")
    wavelength = 2 * math.pi * base ** (np.arange(0, size, 2) / size)
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = scaling["original_max_position_embeddings"] / wavelength
    smooth = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return 1.0 / ((1 - smooth) / scaling["factor"] + smooth)


def _write_weights(
    reader: Any,
    names: dict[str, str | None],
    config: dict[str, Any],
    out: Path,
    on_tensor: OnTensor,
) -> None:
    from safetensors.torch import save_file

    kind = config["model_type"]
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    weights = {}
    for i, tensor in enumerate(reader.tensors):
        on_tensor(i, len(reader.tensors))
        name, part = names[tensor.name], tensor.name.split(".")[-2]
        if name is None:
            continue
        added = 1.0 if kind == "gemma3_text" and part.endswith("norm") else 0.0
        weights[name] = _bf16(tensor, added)
        if kind == "llama" and part in heads:
            weights[name] = _halves_from_pairs(weights[name], heads[part])
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    on_tensor(len(reader.tensors), len(reader.tensors))


def _bf16(tensor: Any, added: float) -> Any:
    """A torch tensor of what is stored, less `added`. Some rows at a time: as float32, the
    embedding of a large vocabulary is several times its file.
    """
    import torch
    from gguf import dequantize

    shape = tuple(int(n) for n in reversed(tensor.shape))
    step = max(1, _ELEMENTS_AT_ONCE // math.prod(shape[1:]))
    weights = torch.empty(shape, dtype=torch.bfloat16)
    for first in range(0, shape[0], step):
        rows = dequantize(tensor.data[first : first + step], tensor.tensor_type)
        weights[first : first + step] = torch.from_numpy(rows - np.float32(added))
    return weights


def layer_names(architecture: str) -> dict[str, str]:
    """The parts of a layer: GGUF's names to those of a checkpoint."""
    return _LAYER_GEMMA3 if architecture == "gemma3" else _LAYER


def hf_name(name: str, layers: dict[str, str]) -> str | None:
    """The tensor's name in a checkpoint; None for what the config says instead."""
    if name == _ROPE_FACTORS:
        return None
    match name.split("."):
        case [part, kind] if part in _TOP:
            return f"{_TOP[part]}.{kind}"
        case ["blk", layer, part, kind] if part in layers:
            return f"model.layers.{layer}.{layers[part]}.{kind}"
    raise BadGgufError(f"it holds a tensor of unknown use, {name}")


def _halves_from_pairs(array: Any, heads: int) -> Any:
    """Rows of each head, from interleaved pairs to two halves. [heads * size, ...]"""
    pairs = array.reshape(heads, -1, 2, *array.shape[1:])
    return pairs.swapaxes(1, 2).reshape(array.shape)


def _require_all(names: set[str | None], layers: dict[str, str], config: dict[str, Any]) -> None:
    has_qk_norm = config["model_type"] in ("qwen3", "gemma3_text")
    optional = set() if has_qk_norm else {"attn_q_norm", "attn_k_norm"}
    parts = [layers[part] for part in layers if part not in optional]
    needed = {f"{_TOP['token_embd']}.weight", f"{_TOP['output_norm']}.weight"}
    for layer in range(config["num_hidden_layers"]):
        needed |= {f"model.layers.{layer}.{part}.weight" for part in parts}
    missing = sorted(needed - names)
    if missing:
        raise BadGgufError(f"{len(missing)} tensors are missing, {missing[0]} among them")


def _write_tokenizer(source: Path, out: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(source.parent), gguf_file=source.name)
    if not tokenizer.is_fast:
        raise BadGgufError(f"its tokenizer ({type(tokenizer).__name__}) has no tokenizer.json form")
    tokenizer.save_pretrained(out)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


def _print_progress(done: int, total: int) -> None:
    print(f"progress {done} {total}", flush=True)


def main() -> int:
    source, out = (Path(argument) for argument in sys.argv[1:])
    try:
        # What the libraries print is not for our caller.
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stderr(nowhere):
            convert(source, out, _print_progress)
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        print(reason, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
