"""The workers of an engine of several for tests: processes that keep torch loaded, and a runner
that has all of them run each plan.

    python -P tests/ranks.py

is one of them. It reads pickled calls from its standard input: ("load", config, spec, rank, file
of the group), which makes a new runner, or ("execute", plan). Each is answered on its standard
output by (True, what came out) or (False, the traceback).
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import traceback
from typing import Any

from ringcast.executor.runner import Done, make_runner
from ringcast.mq.config import EngineConfig, ModelSpec
from ringcast.mq.messages import StepOutput, StepPlan, WorkerReady


class Ranks:
    """Use as a context."""

    def __init__(self, number: int) -> None:
        command = [sys.executable, "-P", __file__]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self._processes = [subprocess.Popen(command, **pipes) for _ in range(number)]

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *error: object) -> None:
        for process in self._processes:
            process.kill()
            process.communicate()

    def load(self, config: EngineConfig, spec: ModelSpec) -> RanksRunner:
        fd = os.memfd_create("ranks")
        path, size = f"/proc/{os.getpid()}/fd/{fd}", config.num_workers
        try:
            loaded = self.call([("load", config, spec, rank, path) for rank in range(size)])
            return RanksRunner(self, loaded, config.output_rank)
        finally:
            os.close(fd)

    def call(self, calls: list[tuple[Any, ...]]) -> list[Any]:
        """One call to each of the first ranks. Raises RuntimeError with the tracebacks."""
        processes = self._processes[: len(calls)]
        for process, call in zip(processes, calls, strict=True):
            pickle.dump(call, process.stdin)
            process.stdin.flush()
        answers = [pickle.load(process.stdout) for process in processes]
        errors = [answer for worked, answer in answers if not worked]
        if errors:
            raise RuntimeError("\n".join(errors))
        return [answer for _, answer in answers]


class RanksRunner:
    """A model runner of several ranks. `loaded` is what each says of itself."""

    def __init__(
        self, ranks: Ranks, loaded: list[tuple[WorkerReady, dict[str, Any]]], output_rank: int
    ) -> None:
        self._ranks, self._output_rank = ranks, output_rank
        self.loaded = loaded

    def load(self, progress: object) -> WorkerReady:
        return self.loaded[0][0]

    def details(self) -> dict[str, Any]:
        return self.loaded[0][1]

    def launch(self, plan: StepPlan) -> Done:
        return Done(self.execute(plan))

    def execute(self, plan: StepPlan) -> StepOutput:
        outputs = self._ranks.call([("execute", plan)] * len(self.loaded))
        *before, output = outputs[: self._output_rank + 1]
        assert not any(other.token_ids for other in before)  # of other stages
        assert all(o.token_ids == output.token_ids for o in outputs[self._output_rank :])
        return output


def main() -> None:
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries print is no answer
    runner: Any = None
    while True:
        try:
            call, *arguments = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        try:
            if call == "load":
                *arguments, path = arguments
                with open(path, "r+b") as file:
                    runner = make_runner(*arguments, file.fileno())
                    answer = runner.load(lambda *_: None), runner.details()
            else:
                answer = runner.execute(*arguments)
            pickle.dump((True, answer), answers)
        except Exception:
            pickle.dump((False, traceback.format_exc()), answers)
        answers.flush()


if __name__ == "__main__":
    main()
