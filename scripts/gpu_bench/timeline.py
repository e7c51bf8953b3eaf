"""Where the time of a run through `LLM` goes on the GPU that this runs on: torch's profiler in the
worker for a whole case of scripts/bench offline, in stretches of steps.

    timeline.py qwen3-0.6b offline256 [--option NAME=JSON ...]

Of each stretch: how long it took, how long the device was idle between steps and within them, and
which kernels took most. The case runs once before, unrecorded. Recording costs the host something
for each launch, so small steps look longer than they are.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve()
sys.path.insert(0, str(HERE.parents[1] / "peers"))

from offline_cases import Case, cases  # noqa: E402

from ringcast import LLM, SamplingParams  # noqa: E402
from ringcast.executor import trace_summary  # noqa: E402

MODELS = HERE.parents[1] / "data" / "models"
KERNELS = 9
NAME = 26  # characters of a kernel's
LENGTHS = (4, 8, 8, 16, 64)  # steps of the first stretches; the others are of the last length


class DeviceStep(NamedTuple):
    """Microseconds. kernels: of each name."""

    begin: float
    end: float
    kernels: Counter[str]

    @property
    def busy(self) -> float:
        return sum(self.kernels.values())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", choices=sorted(path.name for path in MODELS.iterdir()))
    parser.add_argument("case")
    parser.add_argument("--option", action="append", default=[], metavar="NAME=JSON")
    args = parser.parse_args()
    (case,) = cases([args.case])
    options = {name: json.loads(value) for name, value in (o.split("=", 1) for o in args.option)}
    with tempfile.TemporaryDirectory() as folder:
        seconds, recorded = record(str(MODELS / args.model), case, options, folder)
        (trace,) = Path(folder).glob("*.json.gz")
        with gzip.open(trace, "rb") as file:
            steps = steps_of(json.load(file)["traceEvents"])
    print(f"{args.model} {case.name}: {seconds:.3f} s, {recorded:.3f} s recorded; of these")
    whole = (steps[-1].end - steps[0].begin) / 1e6
    print(f"{whole:.3f} s from the first step's beginning to the last one's end on the device")
    report(steps)


def record(model: str, case: Case, options: dict[str, Any], folder: str) -> tuple[float, float]:
    """Seconds without and with the profiler."""
    params = [
        SamplingParams(
            temperature=case.temperature, max_tokens=most, ignore_eos=True, detokenize=False
        )
        for most in case.max_tokens
    ]
    inputs = [{"prompt_token_ids": prompt} for prompt in case.prompts]
    with LLM(
        model,
        load_format="dummy",
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        max_model_len=4096,
        seed=0,
        torch_profiler_dir=folder,
        **options,
    ) as llm:

        def run() -> float:
            start = time.perf_counter()
            llm.generate(inputs, params, use_tqdm=False)
            return time.perf_counter() - start

        run()
        seconds = run()
        llm.start_profile()
        recorded = run()
        llm.stop_profile()
    return seconds, recorded


def steps_of(events: Iterable[dict[str, Any]]) -> list[DeviceStep]:
    """In the order in which they were launched. A step's work is what one graph or the launches
    between two of the host's annotations put on the device.
    """
    complete = [event for event in events if event.get("ph") == "X"]
    launched = {
        event["args"]["correlation"]: float(event["ts"])
        for event in complete
        if event.get("cat") in trace_summary.LAUNCHES and "correlation" in event.get("args", {})
    }
    prefix = trace_summary.annotation(0)[:-1]
    begins = sorted(
        float(event["ts"])
        for event in complete
        if event.get("cat") == "user_annotation" and str(event["name"]).startswith(prefix)
    )
    work: dict[int, list[dict[str, Any]]] = {}
    place = 0
    for event in sorted(
        (event for event in complete if event.get("cat") in trace_summary.DEVICE),
        key=lambda event: launched.get(event["args"].get("correlation"), 0.0),
    ):
        at = launched.get(event["args"].get("correlation"), 0.0)
        while place + 1 < len(begins) and begins[place + 1] <= at:
            place += 1
        work.setdefault(place, []).append(event)
    steps = []
    for _, own in sorted(work.items()):
        kernels: Counter[str] = Counter()
        for event in own:
            kernels[str(event["name"])] += float(event["dur"])
        begin = min(float(event["ts"]) for event in own)
        steps.append(DeviceStep(begin, max(float(e["ts"]) + float(e["dur"]) for e in own), kernels))
    return steps


def report(steps: list[DeviceStep]) -> None:
    first, lengths = 0, list(LENGTHS)
    while first < len(steps):
        count = lengths.pop(0) if len(lengths) > 1 else lengths[0]
        part = steps[first : first + count]
        end = steps[first + count].begin if first + count < len(steps) else part[-1].end
        between = sum(
            max(0.0, b.begin - a.end) for a, b in zip(part, steps[first + 1 :], strict=False)
        )
        kernels: Counter[str] = Counter()
        for step in part:
            kernels.update(step.kernels)
        listed = ", ".join(
            f"{name.removeprefix('void ')[:NAME]} {us / len(part):.0f}"
            for name, us in kernels.most_common(KERNELS)
        )
        last, each = first + len(part) - 1, (end - part[0].begin) / len(part)
        idle = between / len(part)
        print(
            f"steps {first:4} to {last:4}: {each:8.0f} us each, {idle:6.0f} idle between; {listed}"
        )
        first += len(part)


if __name__ == "__main__":
    main()
