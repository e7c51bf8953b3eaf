"""A worker on real rings, with this process as its scheduler and supervisor: in a process of its
own with the fake device, and in a thread with a device whose steps end when the test says so.
"""

import contextlib
import math
import os
import select
import signal
import threading
import time
from pathlib import Path

import msgspec
import pytest
from tiny_model import make_tiny_model

from ringcast.actors import worker as worker_actor
from ringcast.actors.boot import Boot
from ringcast.actors.child import Child
from ringcast.actors.control import Control
from ringcast.actors.scheduler.core import SchedulerCore
from ringcast.actors.topology import channels, target
from ringcast.executor.fake_runner import FakeModelRunner, expected_tokens
from ringcast.executor.runner import OtherHosts
from ringcast.frontend.hub import resolve_model
from ringcast.mq import codec, messages, supervision
from ringcast.mq.cluster_config import ClusterConfig, ClusterPlace
from ringcast.mq.config import EngineConfig
from ringcast.mq.endpoint import ChannelOwner, open_receiver, open_sender
from ringcast.mq.errors import StepTimeoutError
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


def make_config(folder, **options):
    return EngineConfig(
        model=str(make_tiny_model(folder)),
        load_format="dummy",
        device="fake",
        block_size=4,
        **options,
    )


def make_channels(stack, config):
    owners = {
        c.name: ChannelOwner.create(
            config.transport, c.name, c.writer, c.readers, c.messages, 1 << 16, ""
        )
        for c in channels({})
        if c.name in (PLANS, OUTPUTS)
    }
    for owner in owners.values():
        stack.callback(owner.close)
    return owners


def make_boot(config, spec, owners, control_fd):
    return Boot(
        actor="worker.0",
        target=target("worker"),
        parent_pid=os.getpid(),
        control_fd=control_fd,
        engine=config,
        spec=spec,
        endpoints=[owner.endpoint("worker.0") for owner in owners.values()],
    )


def connect(stack, owners, config, spec):
    """A scheduler for a worker that is ready."""
    harness = Harness(owners, config, spec)
    stack.callback(harness.plans.close)
    stack.callback(harness.outputs.close)
    harness.take()
    assert harness.core.ready
    return harness


@pytest.fixture
def start(tmp_path: Path, monkeypatch):
    """start(step_seconds, signals, **options): a worker's process that is ready. signals: that it
    gets as soon as it is born."""
    with contextlib.ExitStack() as stack:

        def make(step_seconds, signals=(), **options):
            monkeypatch.setenv("RINGCAST_FAKE_STEP_SECONDS", str(step_seconds))
            config = make_config(tmp_path / "tiny", **options)
            spec = resolve_model(config)
            owners = make_channels(stack, config)
            child = Child.spawn(
                lambda control_fd: make_boot(config, spec, owners, control_fd),
                [fd for owner in owners.values() for fd in owner.endpoint("worker.0").fds],
            )
            stack.callback(end, child)
            for number in signals:
                os.kill(child.pid, number)
            return connect(stack, owners, config, spec)

        yield make


def end(child):
    child.kill()
    poll = select.poll()
    poll.register(child.pidfd, select.POLLIN)
    assert poll.poll(PATIENCE * 1000)
    child.reap()


PROMPT = [70, 71, 72]


def test_signals_of_its_group_end_nobody_who_is_just_born(start):
    harness = start(0.0, signals=(signal.SIGINT, signal.SIGTERM))
    harness.add(PROMPT, max_tokens=2)
    harness.run()
    assert len(harness.tokens) == 2


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


# --- steps in flight ------------------------------------------------------------------------------


class SlowStep:
    """Ends at `ends_at`, by `time.perf_counter()`."""

    def __init__(self, output, ends_at):
        self.output = output
        self.ends_at = ends_at
        self.error = None

    def done(self):
        if self.error is not None:
            raise self.error
        return time.perf_counter() >= self.ends_at

    def wait(self, timeout):
        raise AssertionError("a worker has more to look for than one step")

    def read(self):
        assert self.done(), "a step was read before its end"
        return self.output


class SlowDevice(FakeModelRunner):
    """A device that runs one step after another, `step_seconds` each; without, until `finish`.

    steps: all that were launched. most: how many were in flight at a time.
    """

    step_seconds = math.inf

    def __init__(self, config, spec):
        super().__init__(config, spec)
        self.steps = {}
        self.most = 0

    def execute(self, plan):
        seconds, self.step_seconds = self.step_seconds, 0.0
        try:
            return super().execute(plan)
        finally:
            self.step_seconds = seconds

    def launch(self, plan):
        before = [step.ends_at for step in self.steps.values()]
        ends_at = max([time.perf_counter(), *before[-1:]]) + self.step_seconds
        self.steps[plan.step] = step = SlowStep(self.execute(plan), ends_at)
        self.most = max(self.most, sum(not step.done() for step in self.steps.values()))
        return step

    def finish(self, step):
        until(lambda: step in self.steps)
        self.steps[step].ends_at = 0.0


class InThread:
    """A worker in a thread. error: what broke it."""

    def __init__(self, worker, device, supervisor):
        self.device = device
        self.supervisor = supervisor
        self.worker = worker
        self.error = None
        self.thread = threading.Thread(target=self._run, name="worker")
        self.thread.start()

    def _run(self):
        try:
            self.worker.run()
        except BaseException as error:
            self.error = error

    def join(self):
        self.thread.join(PATIENCE)
        assert not self.thread.is_alive()
        return self.error

    def close(self):
        self.supervisor.close()
        self.join()
        self.worker._plans.close()
        self.worker._outputs.close()
        self.worker._control.close()


@pytest.fixture
def start_slow(tmp_path: Path, monkeypatch):
    """start_slow(step_seconds, planned, **options): a worker on a slow device, and its scheduler,
    which plans `planned` steps ahead.
    """
    with contextlib.ExitStack() as stack:

        def make(step_seconds=math.inf, planned=2, **options):
            ahead = {"max_steps_in_flight": planned}
            config = make_config(tmp_path / "tiny", **{**ahead, **options})
            spec = resolve_model(config)
            device = SlowDevice(config, spec)
            device.step_seconds = step_seconds
            monkeypatch.setattr(worker_actor, "make_runner", lambda *place: device)
            owners = make_channels(stack, config)
            left, right = Control.pair()
            control = Control(right, supervision.SupervisorToActor)
            worker = worker_actor.Worker(make_boot(config, spec, owners, -1), control)
            supervisor = Control(left, supervision.ActorToSupervisor)
            thread = InThread(worker, device, supervisor)
            stack.callback(thread.close)
            return thread, connect(stack, owners, make_config(tmp_path / "tiny", **ahead), spec)

        yield make


def test_who_steps_with_other_hosts_knows_which_workers_are_here(tmp_path):
    """Of three replicas of two ranks, the last two are on this host."""
    together = {"data_parallel_size": 3, "enable_expert_parallel": True, "tensor_parallel_size": 2}
    config = make_config(tmp_path / "tiny", **together)
    place = ClusterPlace(config=ClusterConfig(headless=True), first=1, num=2, session="s")
    with contextlib.ExitStack() as stack:
        owners = make_channels(stack, config)
        boot = make_boot(config, resolve_model(config), owners, -1)
        boot = msgspec.structs.replace(boot, cluster=place)
        left, right = Control.pair()
        stack.callback(left.close)
        control = Control(right, supervision.SupervisorToActor)
        stack.callback(control.close)
        worker = worker_actor.Worker(boot, control)
        stack.callback(worker._plans.close)
        stack.callback(worker._outputs.close)
        assert worker._others == OtherHosts(1, 4, "127.0.0.1", 2)


def until(condition):
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.001)


def test_a_step_is_launched_behind_the_one_that_runs(start_slow):
    thread, harness = start_slow()
    harness.add(PROMPT, max_tokens=4)
    harness.flush()
    until(lambda: list(thread.device.steps) == [0, 1])
    assert not harness.came
    for step in range(4):
        thread.device.finish(step)
        harness.take()
        harness.flush()
    assert harness.tokens == expected_tokens(PROMPT, 0, 4, harness.core._spec)
    assert thread.device.most == 2


def test_answers_keep_the_order_of_the_steps(start_slow):
    thread, harness = start_slow(planned=3)
    harness.add(PROMPT, max_tokens=3)
    harness.flush()
    for step in (2, 1, 0):
        thread.device.finish(step)
    harness.run()
    assert list(harness.came) == [0, 1, 2]
    assert harness.tokens == expected_tokens(PROMPT, 0, 3, harness.core._spec)


@pytest.mark.parametrize("most", [1, 2, 3])
def test_no_more_are_in_flight_than_may_be(start_slow, most):
    thread, harness = start_slow(0.01, planned=3, max_steps_in_flight=most)
    harness.add(PROMPT, max_tokens=12)
    harness.run()
    assert harness.tokens == expected_tokens(PROMPT, 0, 12, harness.core._spec)
    assert thread.device.most == most


def test_the_place_in_the_channel_moves_with_the_answers(start_slow):
    thread, harness = start_slow()
    harness.add(PROMPT, max_tokens=3)
    harness.flush()
    until(lambda: list(thread.device.steps) == [0, 1])
    assert harness.cursor < harness.published[0]
    for step in range(3):
        thread.device.finish(step)
        harness.take()
        until(lambda step=step: harness.cursor >= harness.published[step])
        harness.flush()
        until(lambda step=step: len(thread.device.steps) == min(step + 3, 3))


def test_a_long_step_is_waited_for_with_naps(start_slow, monkeypatch):
    naps = []

    def sleep(seconds):
        naps.append(seconds)
        time.sleep(seconds)

    monkeypatch.setattr(worker_actor, "sleep", sleep)
    _, harness = start_slow(0.05)
    harness.add(PROMPT, max_tokens=1)
    harness.run()
    assert naps == sorted(naps)
    assert worker_actor.SHORTEST_NAP <= naps[0] < naps[-1]
    assert naps[-1] == worker_actor.LONGEST_NAP


@pytest.mark.parametrize("num_planned", [1, 2])
@pytest.mark.parametrize("how", ["shutdown", "supervisor's death"])
def test_the_end_comes_with_steps_in_flight(start_slow, how, num_planned):
    thread, harness = start_slow()
    harness.add(PROMPT, max_tokens=num_planned)
    harness.flush()
    until(lambda: len(thread.device.steps) == num_planned)
    if how == "shutdown":
        thread.supervisor.send(supervision.Shutdown())
    else:
        thread.supervisor.close()
    assert thread.join() is None
    assert harness.outputs.try_receive() is None


def test_the_schedulers_death_ends_it_with_a_step_in_flight(start_slow):
    thread, harness = start_slow()
    harness.add(PROMPT, max_tokens=1)
    harness.flush()
    until(lambda: thread.device.steps)
    harness.owners[PLANS].mark_dead("scheduler.0")
    assert thread.join() is None


def test_the_schedulers_death_is_met_with_the_answer_where_nothing_more_is_taken(start_slow):
    thread, harness = start_slow()
    harness.add(PROMPT, max_tokens=2)
    harness.flush()
    until(lambda: len(thread.device.steps) == 2)
    for owner in harness.owners.values():
        owner.mark_dead("scheduler.0")
    thread.device.finish(0)
    assert thread.join() is None


@pytest.mark.parametrize("hangs", [0, 1])
def test_a_step_that_does_not_end_ends_the_worker(start_slow, hangs):
    """Step 1's plan is committed with step 0's answer, so nobody else can see it hang."""
    thread, harness = start_slow(step_timeout=0.3)
    harness.add(PROMPT, max_tokens=2)
    harness.flush()
    until(lambda: len(thread.device.steps) == 2)
    for step in range(hangs):
        thread.device.finish(step)
        harness.take()
    error = thread.join()
    assert isinstance(error, StepTimeoutError)
    assert str(error).startswith(f"step {hangs} is not done after 0.")
    assert str(error).endswith(" s on the device (--step-timeout 0.3)")


def test_a_step_has_its_time_from_the_end_of_the_one_before(start_slow):
    thread, harness = start_slow(0.1, planned=5, step_timeout=0.35)
    harness.add(PROMPT, max_tokens=5)
    harness.run()
    assert thread.device.most == 5
    assert thread.error is None


def test_what_a_step_raises_ends_the_worker(start_slow):
    thread, harness = start_slow()
    harness.add(PROMPT, max_tokens=2)
    harness.flush()
    until(lambda: 0 in thread.device.steps)
    thread.device.steps[0].error = broken = RuntimeError("the device fell off the bus")
    assert thread.join() is broken
