"""Tiny models, and a scheduler by hand that gives the same plans to a runner on a device and to the
CPU's, and compares what they answer.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kernels.gpu.devices import DEVICE
from safetensors.torch import save_file

from ringcast.executor.cpu_runner import CpuModelRunner
from ringcast.executor.gpu import attention, decoder, experts, head, linears, nccl_group, sampler
from ringcast.executor.gpu.runner import GpuModelRunner
from ringcast.executor.models.llama import SANDWICH
from ringcast.kernels.gpu import (
    expert_routing,
    few_linear,
    few_linear_table,
    fp8_linear,
    int4_linear,
    stage_pipe,
    step,
)
from ringcast.mq import codec, messages
from ringcast.mq.config import EngineConfig, ModelSpec, build
from ringcast.mq.sampling_params import SamplingParams

SHAPE: dict[str, Any] = {
    "vocab_size": 67,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": True,
        "rope_theta": 100.0,
    },
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "num_key_value_heads": 1},
    "gemma3": {
        "architectures": ["Gemma3ForCausalLM"],
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "sliding_window": 9,
        "query_pre_attn_scalar": 20,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "rope_theta": 900.0, "factor": 2.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
        },
    },
}
MIXTURES: dict[str, dict[str, Any]] = {
    "qwen3 experts": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_experts": 5,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 24,
        "mlp_only_layers": [0],
    },
    "qwen3 experts of 4": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "mlp_only_layers": [0],
    },
    "mixtral": {
        "architectures": ["MixtralForCausalLM"],
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 20,
    },
}
GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)
MAX_MODEL_LEN = 128
NUM_BLOCKS = 60


def make_model(folder: Path, name: str, **changes: object) -> ModelSpec:
    """A folder with random weights, large enough to make tokens differ."""
    config = SHAPE | (MODELS | MIXTURES)[name] | changes
    torch.manual_seed(len(name))
    tensors = dict(_tensors(config))
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return ModelSpec(
        name=name,
        path=str(folder),
        tokenizer_path=str(folder),
        hf_config=config,
        architecture=config["architectures"][0],
        vocab_size=config["vocab_size"],
        max_model_len=MAX_MODEL_LEN,
        eos_token_ids=[2],
    )


def _tensors(config: dict[str, Any]) -> Iterable[tuple[str, torch.Tensor]]:
    hidden, inner, size = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * size, config["num_key_value_heads"] * size
    is_gemma = "Gemma" in config["architectures"][0]
    is_qwen = "Qwen3" in config["architectures"][0]
    yield "model.embed_tokens.weight", _random(config["vocab_size"], hidden)
    if not (is_gemma or config.get("tie_word_embeddings")):
        yield "lm_head.weight", _random(config["vocab_size"], hidden)
    yield "model.norm.weight", _random(hidden)
    for i in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{i}."
        norms = {"input_layernorm", "post_attention_layernorm", *(SANDWICH if is_gemma else ())}
        for name in sorted(norms):  # a set's order is another in each process
            yield f"{prefix}{name}.weight", _random(hidden)
        for name in ("q_norm", "k_norm") if is_gemma or is_qwen else ():
            yield f"{prefix}self_attn.{name}.weight", _random(size)
        linears = {
            "self_attn.q_proj": (q, hidden),
            "self_attn.k_proj": (kv, hidden),
            "self_attn.v_proj": (kv, hidden),
            "self_attn.o_proj": (hidden, q),
            **_feed_forward(config, i, hidden, inner),
        }
        for name, shape in linears.items():
            yield f"{prefix}{name}.weight", _random(*shape)
            if config.get("attention_bias"):
                yield f"{prefix}{name}.bias", _random(shape[0])


def _feed_forward(
    config: dict[str, Any], layer: int, hidden: int, inner: int
) -> dict[str, tuple[int, int]]:
    block, names, num = "mlp", ("gate_proj", "up_proj", "down_proj"), config.get("num_experts")
    if "Mixtral" in config["architectures"][0]:
        block, names, num = "block_sparse_moe", ("w1", "w3", "w2"), config["num_local_experts"]
    prefixes = [f"{block}."]
    if num and layer not in config.get("mlp_only_layers", ()):
        inner = config.get("moe_intermediate_size", inner)
        prefixes = [f"{block}.experts.{number}." for number in range(num)]
    linears = {f"{block}.gate": (num, hidden)} if len(prefixes) > 1 else {}
    for prefix in prefixes:
        shapes = (inner, hidden), (inner, hidden), (hidden, inner)
        linears |= {prefix + name: shape for name, shape in zip(names, shapes, strict=True)}
    return linears


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(shape) * 0.15 + (1.0 if len(shape) == 1 else 0.0)


class TwoRunners:
    """Blocks are given out one after the other (1, 2, ...) and never taken back. `run` and `launch`
    take how many tokens of each row a step computes; `read` compares the oldest launched step with
    what the CPU makes of the same plan.
    """

    def __init__(
        self,
        mine: Any,
        reference: Any,
        block_size: int,
        groups: int,
        num_blocks: int = NUM_BLOCKS,
    ) -> None:
        self.mine, self._reference = mine, reference
        self._num_blocks = num_blocks
        self._block_size, self._groups = block_size, groups
        self.known: dict[int, list[int]] = {}
        self.blocks: dict[int, list[int]] = {}
        self._computed: dict[int, int] = {}
        self._next_block, self._step = 1, 0
        self._new: list[messages.NewSequence] = []
        self._removed: list[int] = []
        self._copies: list[tuple[int, int]] = []
        self._launched: list[tuple[messages.StepPlan, Any]] = []

    def enter(
        self,
        row: int,
        tokens: list[int],
        computed: int = 0,
        blocks: Iterable[int] = (),
        params: SamplingParams = GREEDY,
        num_prompt: int | None = None,
    ) -> None:
        self.known[row], self.blocks[row] = list(tokens), list(blocks)
        self._computed[row] = computed
        new = messages.NewSequence(
            row,
            f"request-{row}",
            0,
            codec.pack(tokens),
            num_prompt or len(tokens),
            computed,
            codec.pack(self.blocks[row]),
            params,
        )
        self._new.append(new)

    def remove(self, row: int) -> None:
        self._removed.append(row)
        del self.known[row], self.blocks[row], self._computed[row]

    def copy(self, source: int) -> int:
        """Copy a block with the next plan; returns the copy."""
        self._copies.append((source, self._take_block()))
        return self._copies[-1][1]

    def launch(self, lengths: dict[int, int]) -> Any:
        appended = [(row, block) for row, n in lengths.items() for block in self._grow(row, n)]
        plan = messages.StepPlan(
            self._step,
            codec.pack(self._removed),
            self._new,
            *(codec.pack([pair[i] for pair in appended]) for i in (0, 1)),
            *(codec.pack([pair[i] for pair in self._copies]) for i in (0, 1)),
            codec.pack(list(lengths)),
            codec.pack(list(lengths.values())),
        )
        self._step += 1
        self._new, self._removed, self._copies = [], [], []
        self._launched.append((plan, self.mine.launch(plan)))
        return self._launched[-1][1]

    @property
    def oldest(self) -> tuple[messages.StepPlan, Any]:
        """What `read` reads next."""
        return self._launched[0]

    def read(self) -> messages.StepOutput:
        plan, pending = self._launched.pop(0)
        output = pending.read()
        assert output.step == plan.step
        assert pending.done()
        tokens = by_row(output)
        if self._reference is not None:
            expected = self._reference.execute(plan)
            assert tokens == by_row(expected), f"step {plan.step}"
        for row, token in tokens.items():
            if row in self.known:
                self.known[row].append(token)
        return output

    def run(self, lengths: dict[int, int]) -> messages.StepOutput:
        self.launch(lengths)
        return self.read()

    def _grow(self, row: int, length: int) -> list[int]:
        self._computed[row] += length
        columns = -(-self._computed[row] // self._block_size)
        missing = columns * self._groups - len(self.blocks[row])
        fresh = [self._take_block() for _ in range(missing)]
        self.blocks[row] += fresh
        return fresh

    def _take_block(self) -> int:
        self._next_block += 1
        assert self._next_block <= self._num_blocks
        return self._next_block - 1


class ReadsAtOnce:
    """The CPU's runner as `generate` and `generate_in_stages` (one_rank.py) want it."""

    def __init__(self, runner: CpuModelRunner) -> None:
        self._decoder, self.launch = runner._model, runner.launch


def by_row(output: messages.StepOutput) -> dict[int, int]:
    rows, tokens = codec.ints(output.rows).tolist(), codec.ints(output.token_ids).tolist()
    return dict(zip(rows, tokens, strict=True))


def random_tokens(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, 67, length).tolist()


@pytest.fixture(scope="session")
def specs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ModelSpec]:
    folder = tmp_path_factory.mktemp("models")
    return {name: make_model(folder / name, name) for name in MODELS | MIXTURES}


def with_defaults(options: dict[str, Any]) -> dict[str, Any]:
    return {
        "device": "cpu",
        "dtype": "float32",
        "block_size": 16,
        "max_num_seqs": 6,
        "max_num_batched_tokens": 64,
        "num_gpu_blocks_override": NUM_BLOCKS,
    } | options


def load(spec: ModelSpec, kind: Callable[..., Any], *place: Any, **options: Any) -> Any:
    made = kind(build(EngineConfig, with_defaults(options)), spec, *place)
    made.load(lambda *_: None)
    return made


KERNELS = {
    attention: (
        "decode_attention",
        "fused_decode_attention",
        "prefill_attention",
        "rope_and_cache",
    ),
    decoder: ("add_rms_norm", "embed", "few_linear", "gated_activation", "rms_norm"),
    experts: ("combine", "expert_down", "expert_gate_up"),
    head: ("add_rms_norm", "few_linear", "rms_norm"),
    nccl_group: ("add_rms_norm", "add_update"),
    sampler: ("sample_plain",),
    step: ("append_tokens", "apply_changes", "lay_out_tokens"),
}


def take_references(monkeypatch: pytest.MonkeyPatch) -> None:
    """Most kernels' references, which take the same arguments."""
    monkeypatch.setattr(stage_pipe, "PROGRAMS", 2)
    for user, names in KERNELS.items():
        for name in names:
            module = importlib.import_module(getattr(user, name).__module__)
            monkeypatch.setattr(user, name, getattr(module, f"{name}_reference"))


def take_routing_references(monkeypatch: pytest.MonkeyPatch) -> None:
    """For threads, in which nothing can be interpreted."""

    def route(*tensors: torch.Tensor, blocks: Any, rows: int, **rest: Any):
        expert_routing.route_reference(*tensors, **rest)
        if blocks is not None:
            held = len(blocks.counts_H)
            expert_routing.dispatch_reference(tensors[1], blocks, rows=rows, held=held)

    monkeypatch.setattr(experts, "route", route)
    monkeypatch.setattr(experts, "dispatch", expert_routing.dispatch_reference)


def take_few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter is slow by programs, not by what is in them."""
    monkeypatch.setattr(stage_pipe, "PROGRAMS", 2)
    config = few_linear_table.Config(rows=32, warps=1, block=64)
    monkeypatch.setattr(few_linear, "configuration", lambda *_: config)


@pytest.fixture
def pair(specs: dict[str, ModelSpec], monkeypatch: pytest.MonkeyPatch) -> Callable[..., TwoRunners]:
    """pair(name of a model, **engine options): a scheduler for both runners, in float32.

    kernels: run them where there is no device too, under the interpreter.
    """

    def make(name: str, against: bool = True, kernels: bool = False, **options: Any) -> TwoRunners:
        if DEVICE.type == "cuda":
            options = {"device": "cuda"} | options
        elif kernels:
            take_few_programs(monkeypatch)
        else:
            take_references(monkeypatch)
        mine = load(specs[name], GpuModelRunner, 0, DEVICE, **options)
        ours = ("device", "enforce_eager", "gpu_memory_utilization")
        reference = None
        if against:
            rest = {k: v for k, v in options.items() if k not in ours}
            reference = load(specs[name], CpuModelRunner, **rest)
        return TwoRunners(mine, reference, 16, len(mine._decoder.groups))

    return make


@pytest.fixture
def references(monkeypatch: pytest.MonkeyPatch) -> None:
    """Most kernels' references, where there is no device."""
    if DEVICE.type != "cuda":
        take_references(monkeypatch)


@pytest.fixture
def all_references(references: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The references of those of quantised layers too."""
    if DEVICE.type != "cuda":
        monkeypatch.setattr(linears, "int4_linear", int4_linear.int4_linear_reference)
        monkeypatch.setattr(linears, "quantize_rows", fp8_linear.quantize_rows_reference)
