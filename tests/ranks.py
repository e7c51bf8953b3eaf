"""The workers of an engine of several for tests: processes that keep torch loaded, and a runner
that has all of them run each plan.

    python -P tests/ranks.py

is one of them. It reads pickled calls from its standard input: ("load", config, spec, rank, file
of the group, engine), which makes a new runner, or ("execute", plan). Each is answered on its
standard output by (True, what came out) or (False, the traceback).
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
        replicas = range(config.data_parallel_size if config.lockstep else 1)
        places = [(rank, path, engine) for engine in replicas for rank in range(size)]
        try:
            loaded = self.call([("load", config, spec, *place) for place in places])
            return RanksRunner(self, loaded, config.output_rank, len(replicas))
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
    """A model runner of several ranks. `loaded` is what each says of itself. num_replicas: that
    step together."""

    def __init__(
        self,
        ranks: Ranks,
        loaded: list[tuple[WorkerReady, dict[str, Any]]],
        output_rank: int,
        num_replicas: int,
    ) -> None:
        self._ranks, self._output_rank = ranks, output_rank
        self._num_replicas = num_replicas
        self.loaded = loaded

    def load(self, progress: object) -> WorkerReady:
        return self.loaded[0][0]

    def details(self) -> dict[str, Any]:
        return self.loaded[0][1]

    def launch(self, plan: StepPlan) -> Done:
        return Done(self.execute(plan))

    def execute(self, plan: StepPlan) -> StepOutput:
        return self.execute_together([plan])[0]

    def execute_together(self, plans: list[StepPlan]) -> list[StepOutput]:
        """A step of each replica."""
        assert len(plans) == self._num_replicas
        size = len(self.loaded) // len(plans)
        outputs = self._ranks.call([("execute", plan) for plan in plans for _ in range(size)])
        return [self._output(outputs[i : i + size]) for i in range(0, len(outputs), size)]

    def _output(self, outputs: list[StepOutput]) -> StepOutput:
        """Of a replica."""
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
                *arguments, path, engine = arguments
                with open(path, "r+b") as file:
                    runner = make_runner(*arguments, file.fileno(), engine)
                    answer = runner.load(lambda *_: None), runner.details()
            else:
                answer = runner.execute(*arguments)
            pickle.dump((True, answer), answers)
        except Exception:
            pickle.dump((False, traceback.format_exc()), answers)
        answers.flush()


if __name__ == "__main__":
    main()
