"""A worker's process on real rings, with this process as its scheduler and supervisor."""

import contextlib
import os
import select
import time
from pathlib import Path

import pytest
from tiny_model import make_tiny_model

from ringcast.actors.boot import Boot
from ringcast.actors.child import Child
from ringcast.actors.scheduler.core import SchedulerCore
from ringcast.actors.topology import channels, target
from ringcast.executor.fake_runner import expected_tokens
from ringcast.frontend.hub import resolve_model
from ringcast.mq import codec, messages
from ringcast.mq.config import EngineConfig
from ringcast.mq.endpoint import ChannelOwner, open_receiver, open_sender
from ringcast.mq.sampling_params import SamplingParams

PATIENCE = 30.0
PLANS, OUTPUTS = "scheduler.0>workers", "worker.0>scheduler.0"


class Harness:
    """sent, came: when each step's plan was sent and its output came, by `time.monotonic()`.

    published: where each plan ends in its channel. `cursor`: where the worker is there.
    """

    def __init__(self, owners, config, spec):
        self.owners = owners
        self.core = SchedulerCore(config, spec)
        self.plans = open_sender(owners[PLANS].endpoint("scheduler.0"))
        self.outputs = open_receiver(owners[OUTPUTS].endpoint("scheduler.0"))
        self.decode = codec.Decoder(messages.WorkerToScheduler)
        self.sent, self.came, self.published, self.tokens = {}, {}, {}, []

    def add(self, prompt, max_tokens):
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, seed=0)
        request = messages.AddRequest(
            "r", 0, codec.pack(prompt), params, messages.OutputSpec(0), 0.0
        )
        self.core.handle("tokenizer.0", request, 0.0)

    def flush(self):
        for send in self.core.flush(0.0):
            if isinstance(send.message, messages.StepPlan):
                self.sent[send.message.step] = time.monotonic()
                self.plans.send(codec.encode(send.message), PATIENCE)
                ((_, _, self.published[send.message.step]),) = self.owners[PLANS].progress()
            elif isinstance(send.message, messages.StreamStep):
                self.tokens += codec.ints(send.message.token_ids).tolist()

    def take(self):
        message = self.decode(self.outputs.receive(PATIENCE))
        self.outputs.commit()
        if isinstance(message, messages.StepOutput):
            self.came[message.step] = time.monotonic()
        self.core.handle("worker.0", message, 0.0)

    def run(self):
        self.flush()
        while self.core.num_unfinished:
            self.take()
            self.flush()

    @property
    def cursor(self):
        ((_, cursor, _),) = self.owners[PLANS].progress()
        return cursor


@pytest.fixture
def start(tmp_path: Path, monkeypatch):
    """start(step_seconds, **options): a worker that is ready."""
    with contextlib.ExitStack() as stack:

        def make(step_seconds, **options):
            monkeypatch.setenv("RINGCAST_FAKE_STEP_SECONDS", str(step_seconds))
            folder = make_tiny_model(tmp_path / "tiny")
            config = EngineConfig(
                model=str(folder), load_format="dummy", device="fake", block_size=4, **options
            )
            spec = resolve_model(config)
            owners = {
                c.name: ChannelOwner.create(
                    config.transport, c.name, c.writer, c.readers, c.messages, 1 << 16, ""
                )
                for c in channels({})
                if c.name in (PLANS, OUTPUTS)
            }
            for owner in owners.values():
                stack.callback(owner.close)
            endpoints = [owner.endpoint("worker.0") for owner in owners.values()]

            def boot(control_fd):
                return Boot(
                    actor="worker.0",
                    target=target("worker"),
                    parent_pid=os.getpid(),
                    control_fd=control_fd,
                    engine=config,
                    spec=spec,
                    endpoints=endpoints,
                )

            child = Child.spawn(boot, [fd for endpoint in endpoints for fd in endpoint.fds])
            stack.callback(end, child)
            harness = Harness(owners, config, spec)
            stack.callback(harness.plans.close)
            stack.callback(harness.outputs.close)
            harness.take()
            assert harness.core.ready
            return harness

        yield make


def end(child):
    child.kill()
    poll = select.poll()
    poll.register(child.pidfd, select.POLLIN)
    assert poll.poll(PATIENCE * 1000)
    child.reap()


PROMPT = [70, 71, 72]


@pytest.mark.parametrize("ahead", [1, 2, 3])
def test_plans_are_sent_before_the_outputs_they_build_on(start, ahead):
    """Plan N + ahead - 1 is sent before output N comes, and the next one after it."""
    harness = start(0.02, max_steps_in_flight=ahead)
    harness.add(PROMPT, max_tokens=8)
    harness.run()
    assert harness.tokens == expected_tokens(PROMPT, 0, 8, harness.core._spec)
    assert list(harness.sent) == list(harness.came) == list(range(8))
    for step in range(8):
        if step + ahead - 1 < 8:
            assert harness.sent[step + ahead - 1] < harness.came[step]
        if step + ahead < 8:
            assert harness.sent[step + ahead] > harness.came[step]


def test_a_plan_is_committed_after_its_own_answer(start):
    """With more plans in its ring the worker's cursor stands before the one that runs: a worker
    that hangs does so in one step, and one that gets on moves at each.
    """
    harness = start(0.1, max_steps_in_flight=3)
    harness.add(PROMPT, max_tokens=4)
    harness.flush()
    assert len(harness.sent) == 3
    assert harness.cursor < harness.published[0]
    for step in range(4):
        harness.take()
        deadline = time.monotonic() + PATIENCE
        while harness.cursor < harness.published[step] and time.monotonic() < deadline:
            time.sleep(0.001)
        assert harness.cursor == harness.published[step]
        harness.flush()
    assert not harness.core.num_unfinished
