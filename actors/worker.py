"""The worker actor: one rank of the engine. The only actor whose process imports torch.

All ranks get every plan and run it together (executor/parallel.py, pipeline.py); the output rank
alone answers.

Its loop is synchronous. It takes a plan as soon as it is there, launches its step, and answers
steps in their order as they are done. How many it holds is the scheduler's to say, and never more
than `most_steps_in_flight`: a device that has the next step already never waits for Python.

    no step in flight    spins for some microseconds (a plan follows an output closely when there is
                         work), then sleeps on two bells: the plans' and the supervisor's
    steps in flight      looks for the first one's end and for the next plan: again and again for as
                         long, then with naps between. A device rings no bell, so a nap is a part
                         of what was waited already: what it adds to a step stays a small part too

Who sees a step that doesn't end: until its plan is committed, the supervisor, by the worker's place
in the channel (stalls.py). A commit gives up all that was received, and follows each answer. So
with a runner whose steps are done once launched, and with one step at a time, the place is always
the step that runs. With several, the plans of those launched behind it go with it; them the worker
watches itself, and ends by StepTimeoutError. What a dead worker had committed is not missed: its
scheduler ends with it, and nobody asks for it again.
"""

from __future__ import annotations

import contextlib
import select
import threading
from collections import deque
from collections.abc import Callable
from time import perf_counter, sleep
from typing import Any, cast

from ..executor.profiler import Profiler, ProfilerError
from ..executor.runner import (
    BalancingRunner,
    ModelRunner,
    OtherHosts,
    PendingStep,
    RankRunner,
    make_runner,
)
from ..mq import codec, messages, supervision
from ..mq.channel import Receiver, Sender
from ..mq.endpoint import open_receiver, open_sender
from ..mq.errors import PeerDeadError, StepTimeoutError
from . import topology
from .boot import Boot
from .control import Control
from .linux import sleep_precisely

SPIN_SECONDS = 50e-6
NAP_SHARE = 1 / 8  # of what was waited already
SHORTEST_NAP, LONGEST_NAP = 20e-6, 100e-6


class Worker:
    """Raises out of `run` what broke it: ConfigError while loading, StepTimeoutError, or what a
    step raised.
    """

    def __init__(self, boot: Boot, control: Control) -> None:
        self._boot = boot
        self._control = control
        self._rank = topology.rank_of(boot.actor, boot.counts)
        engine = topology.engine_of(boot.actor, boot.counts) or 0
        self._others: OtherHosts | None = None
        if boot.cluster is not None and boot.cluster.spans:
            cluster = boot.cluster.config
            num_here = boot.engine.num_workers // cluster.nnodes
            self._others = OtherHosts(boot.cluster.num_links, num_here, cluster.master_addr)
        elif boot.cluster is not None and boot.engine.lockstep:
            width, address = boot.engine.num_workers, boot.cluster.config.ip()
            num_here, first = boot.cluster.num * width, boot.cluster.first * width
            self._others = OtherHosts(1, num_here, address, first)
        elif boot.cluster is not None:
            engine -= boot.cluster.first
        self._engine = engine
        self._plans: Receiver
        self._outputs: Sender
        for endpoint in boot.endpoints:
            if endpoint.role == "send":
                self._outputs = open_sender(endpoint)
            else:
                self._plans = open_receiver(endpoint)
        self._decode: codec.Decoder[messages.StepPlan] = codec.Decoder(messages.SchedulerToWorker)
        self._poll = select.poll()
        self._poll.register(self._plans.fileno(), select.POLLIN)
        self._poll.register(control.fileno(), select.POLLIN)
        self._in_flight: deque[tuple[int, PendingStep]] = deque()  # (the step's number, itself)
        self._first_since = 0.0  # when the first of them became the first
        self._control_poll = select.poll()
        self._control_poll.register(control.fileno(), select.POLLIN)
        self._profiler = Profiler(boot.engine.torch_profiler_dir, boot.actor)
        self._writers: list[threading.Thread] = []  # of profiles

    def run(self) -> None:
        boot = self._boot
        place = self._rank, boot.group_fd, self._engine
        runner = make_runner(boot.engine, boot.spec, *place, self._others)
        ready = runner.load(lambda what, done, total: self._report(what, done, total))
        self._answer(ready)
        self._control.send(supervision.ActorReady({} if self._rank else runner.details()))
        sleep_precisely()
        # The scheduler's death is its whole unit's: the supervisor is about to kill us.
        with contextlib.suppress(PeerDeadError):
            self._serve(runner)
        if boot.engine.num_workers > 1 or boot.engine.lockstep:
            cast(RankRunner, runner).leave()
        for writer in self._writers:
            writer.join()
        self._plans.close()
        self._outputs.close()

    def _serve(self, runner: ModelRunner) -> None:
        """Until it's time to end. Steps in flight by then are given up: nobody waits for them."""
        in_flight, most = self._in_flight, self._boot.engine.most_steps_in_flight
        while True:
            if not in_flight:
                payload = self._next_plan()
                if payload is None:
                    return
                self._launch(runner, payload)
            elif in_flight[0][1].done():
                self._finish_first(runner)
                if self._control_poll.poll(0) and self._ended():
                    return
            elif len(in_flight) < most and (payload := self._plans.try_receive()) is not None:
                self._launch(runner, payload)
            elif not self._wait_for_first():
                return

    def _launch(self, runner: ModelRunner, payload: bytes) -> None:
        plan = self._decode(payload)
        with self._profiler.step(plan.step):
            self._in_flight.append((plan.step, runner.launch(plan)))
        if len(self._in_flight) == 1:
            self._first_since = perf_counter()

    def _finish_first(self, runner: ModelRunner) -> None:
        _, step = self._in_flight.popleft()
        output = step.read()
        if self._rank == self._boot.engine.output_rank:
            self._answer(output)
        if self._boot.engine.enable_eplb:
            for text in cast(BalancingRunner, runner).notices():
                self._control.send(supervision.Notice(text))
        self._plans.commit()
        self._first_since = perf_counter()

    def _wait_for_first(self) -> bool:
        """A moment of waiting for the first step in flight; False when it's time to end."""
        waited = perf_counter() - self._first_since
        if waited < SPIN_SECONDS:
            return True
        number, step = self._in_flight[0]
        limit = self._boot.engine.step_timeout
        if waited >= limit and not step.done():
            raise StepTimeoutError(
                f"step {number} is not done after {waited:.1f} s on the device "
                f"(--step-timeout {limit:g})"
            )
        sleep(min(max(waited * NAP_SHARE, SHORTEST_NAP), LONGEST_NAP))
        return not (self._control_poll.poll(0) and self._ended())

    def _report(self, what: str, done: int, total: int) -> None:
        self._control.send(supervision.Progress(what, done, total))

    def _answer(self, message: messages.WorkerReady | messages.StepOutput) -> None:
        self._outputs.send(codec.encode(message), timeout=self._boot.engine.step_timeout)

    def _next_plan(self) -> bytes | None:
        """The next plan, or None when it's time to end."""
        plans = self._plans
        start = perf_counter()
        while True:
            payload = plans.try_receive()
            if payload is not None:
                return payload
            if perf_counter() - start < SPIN_SECONDS:
                continue
            if plans.arm():
                self._poll.poll()
            plans.disarm()
            if self._ended():
                return None

    def _ended(self) -> bool:
        """Do what the supervisor has said. Returns whether that is to end."""
        try:
            while (packet := self._control.receive()) is not None:
                message: Any = packet[0]
                match message:
                    case supervision.Shutdown():
                        return True
                    case supervision.Profile(ask=ask, start=start):
                        self._profile(ask, start)
        except EOFError:
            return True
        return False

    def _profile(self, ask: int, start: bool) -> None:
        try:
            if start:
                self._profiler.start()
                self._control.send(supervision.Profiled(ask))
                return
            write = self._profiler.stop()
        except ProfilerError as error:
            self._control.send(supervision.Profiled(ask, error=str(error), refused=error.refused))
            return
        # Steps go on meanwhile: to write takes long, and who takes nothing in is taken to hang.
        writer = threading.Thread(target=self._write_profile, args=(ask, write), name="profile")
        self._writers.append(writer)
        writer.start()

    def _write_profile(self, ask: int, write: Callable[[], str]) -> None:
        try:
            answer = supervision.Profiled(ask, report=write())
        except ProfilerError as error:
            answer = supervision.Profiled(ask, error=str(error))
        self._control.send(answer)
