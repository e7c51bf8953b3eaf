"""A worker of scripts/bench offline: Ringcast through `LLM`, random weights, prefix caching off.

Arguments: when it was started, a folder with config.json, the cases (JSON), options of `LLM` as
name=json.
"""

from __future__ import annotations

import json
import sys

from offline_cases import measure

from ringcast import LLM, SamplingParams

folder, names = sys.argv[2], json.loads(sys.argv[3])
options = {
    "load_format": "dummy",
    "skip_tokenizer_init": True,
    "enable_prefix_caching": False,
    "max_model_len": 4096,
    "seed": 0,
    **{name: json.loads(value) for name, value in (a.split("=", 1) for a in sys.argv[4:])},
}
with LLM(folder, **options) as llm:

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

    measure(generate, names)
