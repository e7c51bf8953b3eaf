"""schemathesis against /openapi.json: all of its checks, and one of ours, on thousands of requests.

It expects that a body which fits the schema is accepted. Some of them can't be: a schema doesn't
say how long the model's context is, nor which fields exclude each other. So a 400 is allowed there,
and the check `refusal_names_the_field` (schemathesis_checks.py) holds that it says why.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from cases import KEY, WORK, case, run, url

EXAMPLES = {"fake": 120, "embedding": 40}  # of each operation, beside those of its schema
AT_LEAST = {"fake": 4000, "embedding": 2000}
CONFIG = """
[checks]
positive_data_acceptance.expected-statuses = ["2xx", "400", "401", "404", "429"]
"""


def explore(server: str) -> None:
    config = WORK / "schemathesis.toml"
    config.write_text(CONFIG)
    program = Path(sys.executable).parent / "schemathesis"
    options = ["--checks", "all", "--continue-on-failure", "--no-color", "--warnings", "off"]
    options += ["--suppress-health-check", "all", "--seed", "1", "--request-timeout", "30"]
    options += ["--max-examples", str(EXAMPLES[server]), "-H", f"Authorization: Bearer {KEY}"]
    checks = {"SCHEMATHESIS_HOOKS": "schemathesis_checks", "PYTHONPATH": str(Path(__file__).parent)}
    done = subprocess.run(
        [program, "--config-file", config, "run", url(server, "/openapi.json"), *options],
        capture_output=True,
        text=True,
        env={**os.environ, **checks},
        cwd=WORK,
    )
    counted = re.search(r"(\d+) generated", done.stdout)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    assert counted and int(counted[1]) >= AT_LEAST[server], done.stdout[-500:]
    print(server, counted[0])


@case("all checks, a model that generates")
def generating() -> None:
    explore("fake")


@case("all checks, an embedding model")
def embedding() -> None:
    explore("embedding")


if __name__ == "__main__":
    run()
