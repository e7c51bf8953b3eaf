"""A benchmark worker: Ringcast through `LLM`, all processes of its topology, prefix caching off.

Speaks the protocol of scripts/bench (see transformers_worker.py). Further arguments are options of
`LLM`: name=value.
"""

import json
import random
import sys
import time

from ringcast import LLM, SamplingParams

options = {name: json.loads(value) for name, value in (a.split("=", 1) for a in sys.argv[2:])}
with LLM(sys.argv[1], enable_prefix_caching=False, **options) as llm:
    print("@@ ready", flush=True)
    for line in sys.stdin:
        batch, num_in, num_out, seed = json.loads(line)
        rng = random.Random(seed)
        prompts = [
            {"prompt_token_ids": rng.choices(range(1000, 40000), k=num_in)} for _ in range(batch)
        ]
        params = SamplingParams(temperature=0, max_tokens=num_out, ignore_eos=True)
        start = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - start
        assert all(len(output.outputs[0].token_ids) == num_out for output in outputs)
        print("@@", seconds, flush=True)
