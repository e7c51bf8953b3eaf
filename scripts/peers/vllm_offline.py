"""A worker of scripts/bench offline: vLLM through its own `LLM`, with the options that suit it.

Arguments: when it was started, a folder with config.json, the cases (JSON).
"""

from __future__ import annotations

import json
import sys

from offline_cases import measure
from vllm import LLM, SamplingParams


def main() -> None:
    llm = LLM(
        sys.argv[2],
        skip_tokenizer_init=True,
        load_format="dummy",
        max_model_len=4096,
        gpu_memory_utilization=0.85,
        enable_prefix_caching=False,
        max_num_seqs=256,
        seed=0,
    )

    def generate(prompts: list[list[int]], max_tokens: list[int], temperature: float) -> int:
        params = [
            SamplingParams(
                temperature=temperature, max_tokens=most, ignore_eos=True, detokenize=False
            )
            for most in max_tokens
        ]
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = llm.generate(inputs, params, use_tqdm=False)
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    measure(generate, json.loads(sys.argv[3]))


if __name__ == "__main__":  # its processes start by spawn
    main()
