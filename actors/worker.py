"""The worker actor: one rank of the engine. The only actor whose process imports torch.

Its loop is synchronous and has one thing to do: take the next plan, execute it, answer. While it
waits it spins for some microseconds (a plan follows an output closely when there is work), then
sleeps on two bells: the plans' and the supervisor's. While the scheduler runs ahead there are more
plans to take. Each is committed when it is answered, and before the next one is taken, so that the
place in the channel is the step that runs (stalls.py).
"""

from __future__ import annotations

import contextlib
import select
import time
from typing import Any

from ..executor.runner import make_runner
from ..mq import codec, messages, supervision
from ..mq.channel import Receiver, Sender
from ..mq.endpoint import open_receiver, open_sender
from ..mq.errors import PeerDeadError
from .boot import Boot
from .control import Control

SPIN_SECONDS = 50e-6


class Worker:
    """Raises out of `run` what broke it: ConfigError while loading, or what a step raised."""

    def __init__(self, boot: Boot, control: Control) -> None:
        self._boot = boot
        self._control = control
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

    def run(self) -> None:
        boot = self._boot
        rank = int(boot.actor.partition(".")[2])
        runner = make_runner(boot.engine, boot.spec, rank)
        ready = runner.load(lambda what, done, total: self._report(what, done, total))
        self._answer(ready)
        self._control.send(supervision.ActorReady(runner.details()))
        # The scheduler's death is its whole unit's: the supervisor is about to kill us.
        with contextlib.suppress(PeerDeadError):
            while (payload := self._next_plan()) is not None:
                self._answer(runner.execute(self._decode(payload)))
                self._plans.commit()
        self._plans.close()
        self._outputs.close()

    def _report(self, what: str, done: int, total: int) -> None:
        self._control.send(supervision.Progress(what, done, total))

    def _answer(self, message: messages.WorkerReady | messages.StepOutput) -> None:
        self._outputs.send(codec.encode(message), timeout=self._boot.engine.step_timeout)

    def _next_plan(self) -> bytes | None:
        """The next plan, or None when it's time to end."""
        plans = self._plans
        start = time.perf_counter()
        while True:
            payload = plans.try_receive()
            if payload is not None:
                return payload
            if time.perf_counter() - start < SPIN_SECONDS:
                continue
            if plans.arm():
                self._poll.poll()
            plans.disarm()
            if self._ended():
                return None

    def _ended(self) -> bool:
        try:
            while (packet := self._control.receive()) is not None:
                message: Any = packet[0]
                if isinstance(message, supervision.Shutdown):
                    return True
        except EOFError:
            return True
        return False
