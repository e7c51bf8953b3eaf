"""The workers of an engine of several for tests: processes that keep torch loaded, and a runner
that has all of them run each plan.

    python -P tests/ranks.py CALLS ANSWERS ...

loads torch once and becomes one of them for each pair of pipes. It reads pickled calls: ("load",
config, spec, rank, file of the group, engine), which makes a new runner, or ("execute", plan). Each
is answered by (True, what came out) or (False, the traceback).
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import traceback
from typing import Any

from ringcast.actors.linux import die_with_parent
from ringcast.executor.runner import Done, make_runner
from ringcast.mq.config import EngineConfig, ModelSpec
from ringcast.mq.messages import StepOutput, StepPlan, WorkerReady


class Ranks:
    """Use as a context."""

    def __init__(self, number: int) -> None:
        pipes = [(os.pipe(), os.pipe()) for _ in range(number)]
        theirs = [fd for (calls, _), (_, answers) in pipes for fd in (calls, answers)]
        command = [sys.executable, "-P", __file__, *map(str, theirs)]
        # A library's threads don't outlive a fork.
        env = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
        self._first = subprocess.Popen(command, pass_fds=theirs, env=env)
        for fd in theirs:
            os.close(fd)
        self._calls = [os.fdopen(calls, "wb") for (_, calls), _ in pipes]
        self._answers = [os.fdopen(answers, "rb") for _, (answers, _) in pipes]

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *error: object) -> None:
        for pipe in self._calls:
            pipe.close()  # which ends them
        try:
            self._first.wait(5)
        except subprocess.TimeoutExpired:
            self._first.kill()
            self._first.wait()
        for pipe in self._answers:
            pipe.close()

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
        for pipe, call in zip(self._calls, calls, strict=False):
            pickle.dump(call, pipe)
            pipe.flush()
        answers = [pickle.load(pipe) for pipe in self._answers[: len(calls)]]
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
    import ringcast.executor.cpu_runner  # noqa: F401  torch, while there is one process

    parent, fds = os.getpid(), [int(word) for word in sys.argv[1:]]
    for calls, answers in zip(fds[::2], fds[1::2], strict=True):
        if not os.fork():
            die_with_parent(parent)
            for fd in {*fds} - {calls, answers}:
                os.close(fd)
            serve(os.fdopen(calls, "rb"), os.fdopen(answers, "wb"))
            os._exit(0)
    for fd in fds:
        os.close(fd)
    for _ in fds[::2]:
        os.wait()


def serve(calls: Any, answers: Any) -> None:
    runner: Any = None
    while True:
        try:
            call, *arguments = pickle.load(calls)
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
