"""guidellm: a short load of concurrent chats, as people measure servers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from cases import KEY, MODEL, TOKENIZER, WORK, case, run, url, wait_idle

REQUESTS = 40


def measure(request_format: str) -> None:
    written = WORK / f"guidellm{request_format.replace('/', '-')}.json"
    backend = f"kind=openai_http,target={url('fake', '')},model={MODEL},api_key={KEY}"
    command = [str(Path(sys.executable).parent / "guidellm"), "run"]
    command += ["--disable-console-interactive"]
    command += ["--backend", f"{backend},request_format={request_format}"]
    command += ["--profile", "kind=concurrent,streams=8"]
    command += ["--constraint", f"kind=max_requests,count={REQUESTS}"]
    command += ["--tokenizer", f"kind=huggingface_auto,model={TOKENIZER}"]
    command += ["--data", "kind=synthetic_text,prompt_tokens=32,output_tokens=16"]
    command += ["--output", f"kind=json,path={written}"]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        cwd=WORK,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    (benchmark,) = json.loads(written.read_text())["benchmarks"]
    # Of all that it made; its metrics leave out what ended after the time that it measures.
    made: dict[str, Any] = benchmark["scheduler_metrics"]["requests_made"]
    assert (made["successful"], made["total"]) == (REQUESTS, REQUESTS), made
    wait_idle("fake")


@case("chat, 8 streams")
def chat() -> None:
    measure("/v1/chat/completions")


@case("completions, 8 streams")
def completions() -> None:
    measure("/v1/completions")


if __name__ == "__main__":
    run()
