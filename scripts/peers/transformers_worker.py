"""A benchmark worker: transformers' own `generate` in bf16, greedy, one static batch.

Speaks the protocol of scripts/bench: prints "@@ ready", then for each line [batch, tokens in,
tokens out] on stdin does that much work and prints "@@ seconds".
"""

import json
import os
import sys
import time

import torch
from transformers import AutoModelForCausalLM

torch.set_num_threads(os.cpu_count() or 1)
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.bfloat16).eval()
print("@@ ready", flush=True)
for line in sys.stdin:
    batch, num_in, num_out, seed = json.loads(line)
    ids = torch.randint(1000, 40000, (batch, num_in), generator=torch.Generator().manual_seed(seed))
    start = time.perf_counter()
    with torch.inference_mode():
        out = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            min_new_tokens=num_out,
            max_new_tokens=num_out,
            do_sample=False,
        )
    seconds = time.perf_counter() - start
    assert out.shape == (batch, num_in + num_out)
    print("@@", seconds, flush=True)
