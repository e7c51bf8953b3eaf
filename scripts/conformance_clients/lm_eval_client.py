"""lm-eval's local-completions on small tasks of its own making: log-likelihoods, and generation."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from cases import KEY, MODEL, TOKENIZER, WORK, case, run, url

FOLDER = WORK / "tasks"
CHOICES = [
    ("The capital of France is", [" Paris", " purple", " seven"], 0),
    ("1, 2, 3, 4,", [" 9, 9", " 5, 6", " cat"], 1),
    ("The opposite of hot is", [" cold", " spoon", " under"], 0),
    ("Fish live in the", [" fire", " water", " book"], 1),
]
CHOICE_TASK = """
task: ringcast_choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/choice.jsonl}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_target: answer
doc_to_choice: choices
target_delimiter: ""
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
metadata: {{version: 1}}
"""
WORD_TASK = """
task: ringcast_words
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/words.jsonl}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
generation_kwargs: {{until: ["8"], max_gen_toks: 24, temperature: 0}}
metric_list: [{{metric: exact_match, aggregation: mean, higher_is_better: true}}]
metadata: {{version: 1}}
"""


def evaluate(task: str, batch_size: int = 1, **options: Any) -> dict[str, Any]:
    FOLDER.mkdir(exist_ok=True)
    rows = [{"question": q, "choices": c, "answer": a} for q, c, a in CHOICES]
    (FOLDER / "choice.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (FOLDER / "choice.yaml").write_text(CHOICE_TASK.format(folder=FOLDER))
    word = {"question": "1, 2, 3, 4, 5,", "answer": " 6, 7, "}
    (FOLDER / "words.jsonl").write_text(json.dumps(word) + "\n")
    (FOLDER / "words.yaml").write_text(WORD_TASK.format(folder=FOLDER))
    settings = {
        "model": MODEL,
        "base_url": url("real", "/v1/completions"),
        "tokenizer_backend": "huggingface",
        "tokenizer": TOKENIZER,
        "max_length": 2048,
        **options,
    }
    written = WORK / f"lm_eval-{task}-{len(options)}"
    command: list[str | Path] = [sys.executable, "-m", "lm_eval", "--model", "local-completions"]
    command += ["--model_args", ",".join(f"{key}={value}" for key, value in settings.items())]
    command += [
        "--batch_size",
        str(batch_size),
        "--tasks",
        task,
        "--include_path",
        FOLDER,
        "--output_path",
        written,
    ]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        env={**os.environ, "OPENAI_API_KEY": KEY},
        cwd=WORK,
    )
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-2000:]
    (results,) = Path(written).rglob("results_*.json")
    return json.loads(results.read_text())["results"][task]


@case("log-likelihoods, prompts as token ids")
def choices() -> None:
    assert evaluate("ringcast_choice", batch_size=4)["acc,none"] >= 0.75


@case("log-likelihoods, prompts as text, several at once")
def texts() -> None:
    got = evaluate("ringcast_choice", tokenized_requests=False, num_concurrent=4)
    assert got["acc,none"] >= 0.75


@case("generate_until")
def words() -> None:
    assert evaluate("ringcast_words")["exact_match,none"] == 1


if __name__ == "__main__":
    run()
