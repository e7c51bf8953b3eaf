"""Random models of every kind, whose sizes don't fit nicely, and runs of them that are compared.

Where two continuations part, it must be a tie: the two best log-probabilities at that place lie
closer than 1e-3.
"""

from __future__ import annotations

import numpy as np
from in_process import InProcessEngine

from ringcast import SamplingParams
from ringcast.mq.config import EngineConfig, ModelSpec, build

VOCABULARY = 91  # splits into 46 + 45, and into 3 x 23 + 22
TIE = 1e-3
NUM_TOKENS = 16
GREEDY = SamplingParams(
    temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=2, prompt_logprobs=1
)
SEEDED = SamplingParams(
    temperature=1.2,
    top_p=0.95,
    max_tokens=NUM_TOKENS,
    ignore_eos=True,
    seed=7,
    n=2,
    repetition_penalty=1.1,
    logit_bias={5: 2.0},
)
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 40,
    "intermediate_size": 56,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "max_position_embeddings": 160,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GEMMA = {
    "num_key_value_heads": 1,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "sliding_window": 8,
    "query_pre_attn_scalar": 24,
}
BIASES = {"attention_bias": True, "mlp_bias": True}
MODELS = {
    "llama tied": ("LlamaForCausalLM", {"tie_word_embeddings": True, "num_key_value_heads": 2}),
    "llama biases": ("LlamaForCausalLM", BIASES),
    "mistral": ("MistralForCausalLM", {"num_key_value_heads": 2, "sliding_window": 9}),
    "qwen2": ("Qwen2ForCausalLM", {"num_attention_heads": 8, "num_key_value_heads": 2}),
    "qwen3": ("Qwen3ForCausalLM", {"num_key_value_heads": 2}),
    "gemma3": ("Gemma3ForCausalLM", GEMMA),
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 20}
MIXTURES = {
    "qwen3 experts": ("Qwen3MoeForCausalLM", {**EXPERTS, "mlp_only_layers": [1]}),
    "mixtral": ("MixtralForCausalLM", {"num_local_experts": 4, "sliding_window": 24}),
}
SMALL = {
    "dtype": "float32",
    "block_size": 4,
    "max_num_batched_tokens": 32,
    "max_num_seqs": 8,
    "num_threads": 1,
    "num_gpu_blocks_override": 900,
    "startup_timeout": 300.0,
}


class RandomWeights:
    """Makes every weight that is asked for, and keeps it in float32."""

    def __init__(self):
        import torch

        self.tensors = {}
        self._generator = torch.Generator().manual_seed(3)

    def take(self, name, shape, part=()):
        import torch

        drawn = torch.empty(shape).normal_(0.0, 0.2, generator=self._generator)
        self.tensors[name] = drawn + name.endswith("norm.weight")
        return self.tensors[name][part]

    def finish(self, ignored):
        pass


def make_model(folder, name):
    import torch
    from safetensors.torch import save_file

    from ringcast.executor.cpu_decoder import CpuDecoder
    from ringcast.executor.layers import Layout
    from ringcast.executor.models import find_model

    architecture, changes = (MODELS | MIXTURES)[name]
    hf_config = {**SHAPE, "architectures": [architecture], **changes}
    folder.mkdir(exist_ok=True)
    weights = RandomWeights()
    declared = find_model(architecture).check(hf_config)
    CpuDecoder(declared, Layout(torch.float32), 4, weights, lambda *_: None)
    save_file(weights.tensors, folder / "model.safetensors")
    return ModelSpec(
        name=name,
        path=str(folder),
        tokenizer_path=str(folder),
        architecture=architecture,
        vocab_size=VOCABULARY,
        max_model_len=160,
        eos_token_ids=[2],
        hf_config=hf_config,
    )


class Models:
    """They are made when they are first asked for, in `folder`. ranks: of the engines."""

    def __init__(self, folder, ranks):
        self.ranks = ranks
        self._folder = folder
        self._specs, self._references = {}, {}

    def spec(self, name):
        if name not in self._specs:
            self._specs[name] = make_model(self._folder / name, name)
        return self._specs[name]

    def engine(self, name, **options):
        config = build(EngineConfig, {**SMALL, **options})
        return InProcessEngine(config, self.spec(name), self.ranks.load(config, self.spec(name)))

    def reference(self, name):
        """Of this process: an engine that has run the prompts; its tokens, greedy and seeded."""
        if name not in self._references:
            one = InProcessEngine(build(EngineConfig, SMALL), self.spec(name))
            self._references[name] = one, run_greedy(one, prompts()), run_seeded(one, prompts())
        return self._references[name]


def prompts():
    """They begin alike."""
    stem = [3 + i * i % 83 for i in range(24)]
    return [[*stem, *(5 + (i * number) % 77 for i in range(7 * number))] for number in range(1, 7)]


def run_greedy(engine, prompts):
    for i, prompt in enumerate(prompts):
        engine.add(f"greedy {i}", prompt, GREEDY)
    engine.run()
    return [engine.tokens[f"greedy {i}"][0] for i in range(len(prompts))]


def run_seeded(engine, prompts):
    for i, prompt in enumerate(prompts):
        engine.add(f"seeded {i}", prompt, SEEDED)
    engine.run()
    return [engine.tokens[f"seeded {i}"] for i in range(len(prompts))]


def assert_same(engine, got, want, tolerance=TIE):
    """engine: the reference. Up to a tie, after which anything may follow. Most have none."""
    same = 0
    for i, (mine, theirs) in enumerate(zip(got, want, strict=True)):
        assert len(mine) == len(theirs) == NUM_TOKENS
        parts = [at for at in range(NUM_TOKENS) if mine[at] != theirs[at]]
        same += not parts
        if parts:
            best, second = sorted(engine.logprobs[f"greedy {i}"][0][parts[0]].values())[-2:][::-1]
            assert best - second < tolerance, (i, parts[0], mine, theirs)
    assert same >= len(want) - 1


def prompt_logprobs(engine, i):
    parts = engine.prompt_logprobs[f"greedy {i}"]
    return np.concatenate([np.frombuffer(part.logprobs.logprobs, np.float32) for part in parts])
