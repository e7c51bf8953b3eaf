"""vllm: `vllm bench serve`, with which people measure any server that speaks OpenAI's protocol."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

from cases import EMBEDDING_MODEL, KEY, MODEL, TOKENIZER, WORK, case, run, url, wait_idle

REQUESTS, WORDS_IN, WORDS_OUT = 24, 32, 16


def measure(server: str, backend: str, path: str, *more: str) -> dict[str, Any]:
    """What it writes of REQUESTS random prompts of WORDS_IN tokens, eight at a time."""
    written = f"vllm-{backend}-{server}.json"
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "bench", "serve"]
    command += ["--backend", backend, "--base-url", url(server, ""), "--endpoint", path]
    command += ["--tokenizer", TOKENIZER, "--dataset-name", "random", "--seed", "1"]
    command += ["--random-input-len", str(WORDS_IN), "--random-output-len", str(WORDS_OUT)]
    command += ["--num-prompts", str(REQUESTS), "--max-concurrency", "8", "--disable-tqdm"]
    command += ["--save-result", "--result-dir", str(WORK), "--result-filename", written, *more]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        cwd=WORK,
        env=os.environ | {"OPENAI_API_KEY": KEY, "VLLM_NO_USAGE_STATS": "1"},
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    result: dict[str, Any] = json.loads((WORK / written).read_text())
    assert result["completed"] == REQUESTS, (result, done.stdout[-2000:])
    wait_idle(server)
    return result


def generate(backend: str, path: str) -> None:
    result = measure("fake", backend, path, "--model", MODEL, "--ignore-eos", "--save-detailed")
    assert result["output_lens"] == [WORDS_OUT] * REQUESTS, result["output_lens"]
    assert min(result["ttfts"]) > 0, result["ttfts"]
    assert all(result["itls"]), result["itls"]  # that it was streamed


@case("completions, 8 streams")
def completions() -> None:
    generate("openai", "/v1/completions")


@case("chat, 8 streams")
def chat() -> None:
    generate("openai-chat", "/v1/chat/completions")


@case("embeddings, 8 at a time")
def embeddings() -> None:
    result = measure("embedding", "openai-embeddings", "/v1/embeddings", "--model", EMBEDDING_MODEL)
    assert result["total_input_tokens"] > 0, result


if __name__ == "__main__":
    run()
