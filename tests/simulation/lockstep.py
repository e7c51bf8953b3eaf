"""Replicas that step together, 2 to 64 of them: waves and meetings under random delays and deaths.

The shipped schedulers, coordinator and fake runner run under virtual time, without what is around
them: requests come to any scheduler, and are handed over again after a death (with the output so
far) as a client would. What the lifecycle promises is kept: all that the dead had sent is heard
before their loss, and the loss before the next incarnation; but a coordinator that is starting
hears of an engine's death late, maybe after words of both its lives. What must hold:

    always   workers that meet are in the same step of the same wave, as often met as each other
    at rest  nobody waits in a meeting; all have paused, after the same wave and as many steps; each
             request has ended once, with the right tokens
"""

from __future__ import annotations

import random
import types
from collections import Counter, deque
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest import mock

import numpy as np

from ringcast.actors.coordinator_core import CoordinatorCore
from ringcast.actors.core import PeerLost, Send
from ringcast.actors.scheduler.core import SchedulerCore
from ringcast.executor.fake_runner import FakeModelRunner, expected_tokens
from ringcast.executor.lockstep import check_places
from ringcast.mq import codec, messages
from ringcast.mq.config import EngineConfig, ModelSpec
from ringcast.mq.sampling_params import SamplingParams

from .clock import Clock

MOST_EVENTS = 400_000
_SPEC = ModelSpec(
    name="fake",
    path="",
    tokenizer_path="",
    architecture="Fake",
    vocab_size=258,
    max_model_len=64,
    eos_token_ids=[257],
    hf_config={},
)


class Result(NamedTuple):
    num_events: int
    counts: dict[str, int]


class _Request:
    """What a client knows of it. tokens, ended: by choice. stop_at: tokens after which the
    detokenizer finds a stop string in choice 0."""

    def __init__(self, number: int, rng: random.Random) -> None:
        self.name = f"request-{number}"
        self.prompt = [rng.randrange(64, 256) for _ in range(rng.randrange(1, 24))]
        self.params = SamplingParams(n=rng.choice([1, 1, 1, 2]), max_tokens=rng.randrange(1, 20))
        self.stop_at = rng.randrange(1, 20) if rng.random() < 0.2 else None
        self.incarnation = 0
        self.arrived = self.aborted = False
        self.tokens: dict[int, list[int]] = {i: [] for i in range(self.params.n)}
        self.ended: dict[int, str] = {}

    @property
    def done(self) -> bool:
        return len(self.ended) == self.params.n

    def message(self) -> messages.AddRequest:
        left = [choice for choice in self.tokens if choice not in self.ended]
        begun = any(self.tokens.values()) or len(left) < self.params.n
        resume = [messages.Resume(i, codec.pack(self.tokens[i])) for i in left] if begun else []
        return messages.AddRequest(
            self.name,
            self.incarnation,
            codec.pack(self.prompt),
            self.params,
            messages.OutputSpec(0),
            arrival=0.0,
            resume=resume,
        )

    def check(self) -> None:
        assert self.done, f"{self.name} is lost: {self.ended}"
        for choice, reason in self.ended.items():
            tokens = self.tokens[choice]
            most = self.params.max_tokens
            assert most is not None
            assert tokens == expected_tokens(self.prompt, choice, most, _SPEC)[: len(tokens)]
            if reason == "length":
                assert len(tokens) == most
            elif reason == "stop":
                assert choice == 0
                assert self.stop_at is not None
                assert len(tokens) >= self.stop_at
            else:
                assert reason == "abort"
                assert self.aborted


class _Replica:
    """A scheduler and its worker."""

    def __init__(self, engine: int, config: EngineConfig) -> None:
        name = f"scheduler.{engine}"
        self.core = SchedulerCore(config, _SPEC, name=name)
        self.runner = FakeModelRunner(config, _SPEC, engine=engine)
        self.runner.meet = lambda place, tokens: self.any_work
        self.any_work = False
        self.plans: deque[messages.StepPlan] = deque()
        self.place: tuple[int, int, int] | None = None  # while it waits in a meeting
        self.busy = False
        self.meetings = 0
        self.streams: dict[int, tuple[str, int, int]] = {}  # (request, incarnation, choice)


class Lockstep:
    """One run."""

    def __init__(self, seed: int, replicas: int | None = None) -> None:
        self.rng = rng = random.Random(f"{seed} lockstep")
        self.clock = Clock()
        drawn = rng.choice([2, 2, 2, 3, 3, 4, 4, 6, 8, 13])
        self.num = replicas or drawn
        self.config = EngineConfig(
            device="fake",
            enable_expert_parallel=True,
            data_parallel_size=self.num,
            block_size=4,
            num_gpu_blocks_override=rng.choice([18, 40]),
            max_num_seqs=rng.choice([2, 8]),
            max_num_batched_tokens=rng.choice([5, 32]),
            max_steps_in_flight=rng.choice([1, 2, 3, 5]),
        )
        self.mean = {kind: rng.choice([1e-4, 1e-3, 1e-2]) for kind in ("step", "way")}
        self.counts: Counter[str] = Counter()
        self.life = 0  # of the replicas
        self.down = False
        self.coordinator: CoordinatorCore | None = None
        self.heard: deque[tuple[str, Any]] = deque()  # what waits for a coordinator that starts
        self.session = 0  # of the coordinator
        self._arrivals: dict[tuple[Any, ...], float] = {}
        count = rng.randrange(1, 4 + min(self.num * 2, 12))
        self.requests = {r.name: r for r in (_Request(i, rng) for i in range(count))}
        self._begin()
        self._start_coordinator()

    def run(self) -> Result:
        rng = self.rng
        spread = rng.choice([0.001, 0.05, 0.5])
        for request in self.requests.values():
            self.clock.after(rng.random() * spread, self._submit, request)
            if rng.random() < 0.15:
                self.clock.after(rng.random() * spread * 1.5, self._abort, request)
        for _ in range(rng.choice([0, 0, 1, 2])):
            self.clock.after(rng.random() * spread * 1.2, self._kill_coordinator)
        for _ in range(rng.choice([0, 0, 1, 2])):
            self.clock.after(rng.random() * spread * 1.2, self._kill_replicas)
        while self.clock.step():
            assert self.clock.num_events < MOST_EVENTS, "it goes on and on"
        self._check()
        return Result(self.clock.num_events, dict(self.counts))

    # Ways

    def _late(
        self, way: tuple[Any, ...], mean: float, call: Callable[..., None], *args: Any
    ) -> None:
        """Call it later, and after what went this way before."""
        chance = self.rng.random()
        delay = mean * (2 * chance if chance < 0.97 else 40 * chance)
        at = max(self._arrivals.get(way, 0.0) + 1e-9, self.clock.now + delay)
        self._arrivals[way] = at
        self.clock.after(at - self.clock.now, call, *args)

    def _deliver(self, source: str, engine: int, message: Any) -> None:
        """To a scheduler of this life, whatever becomes of the sender."""
        way, life = (source, engine, self.life), self.life
        self._late(way, self.mean["way"], self._scheduler_hears, life, source, engine, message)

    def _scheduler_hears(self, life: int, source: str, engine: int, message: Any) -> None:
        if life != self.life or self.down:
            return
        replica = self.replicas[engine]
        now = self.clock.now
        self._apply(engine, replica.core.handle(source, message, now))
        self._apply(engine, replica.core.flush(now))
        if self.clock.num_events % 8 == 0:
            replica.core.check()

    def _apply(self, engine: int, sends: Any) -> None:
        replica = self.replicas[engine]
        for send in sends:
            match send.message:
                case messages.StepPlan():
                    self._late(
                        ("plan", engine, self.life),
                        self.mean["way"],
                        self._worker_gets,
                        self.life,
                        engine,
                        send.message,
                    )
                case messages.OpenStream(stream=stream, request_id=name, incarnation=number):
                    replica.streams[stream] = (name, number, send.message.choice)
                case messages.StreamStep():
                    self._read(engine, send.message)
                case messages.WantWave() | messages.Load():
                    way = ("coordinator", engine, self.session)
                    source = f"scheduler.{engine}"
                    args = (self.session, source, send.message)
                    self._late(way, self.mean["way"], self._coordinator_hears, *args)

    # Workers

    def _worker_gets(self, life: int, engine: int, plan: messages.StepPlan) -> None:
        if life == self.life and not self.down:
            self.replicas[engine].plans.append(plan)
            self._look(engine)

    def _look(self, engine: int) -> None:
        """Whether a worker can go to the next meeting, and whether it was the last one missing."""
        replica = self.replicas[engine]
        if replica.busy or replica.place is not None or not replica.plans:
            return
        wave = replica.plans[0].wave
        assert wave is not None
        replica.place = (replica.meetings, wave.wave, wave.step)
        if any(other.place is None for other in self.replicas):
            return
        check_places(np.array([other.place for other in self.replicas], np.int32))
        self.counts["meetings"] += 1
        any_work = any(
            other.plans[0].wave is not None and other.plans[0].wave.has_work
            for other in self.replicas
        )
        for number, other in enumerate(self.replicas):
            other.place, other.busy, other.any_work = None, True, any_work
            other.meetings += 1
            self._late((), self.mean["step"], self._answer, self.life, number)
            self._arrivals.pop(())

    def _answer(self, life: int, engine: int) -> None:
        if life != self.life or self.down:
            return
        replica = self.replicas[engine]
        replica.busy = False
        self._deliver("worker", engine, replica.runner.execute(replica.plans.popleft()))
        self._look(engine)

    # Requests

    def _submit(self, request: _Request) -> None:
        request.arrived = True
        if not self.down and not request.done:
            engine = self.rng.randrange(min(self.num, 1 + self.rng.randrange(self.num)))
            self._deliver("tokenizer", engine, request.message())

    def _abort(self, request: _Request) -> None:
        if request.done or self.down or not request.arrived:
            return
        request.aborted = True
        for engine in range(self.num):
            abort = messages.AbortRequest(request.name, request.incarnation)
            self._deliver("tokenizer", engine, abort)

    def _read(self, engine: int, step: messages.StreamStep) -> None:
        replica = self.replicas[engine]
        rest = (codec.ints(array).tolist() for array in (step.token_index, step.token_ids))
        arrays = (codec.longs(step.streams).tolist(), *rest)
        for stream, index, token in zip(*arrays, strict=True):
            name, incarnation, choice = replica.streams[stream]
            request = self.requests[name]
            assert incarnation == request.incarnation
            tokens = request.tokens[choice]
            assert len(tokens) == index, "a token is lost, or comes twice"
            tokens.append(token)
            if choice == 0 and len(tokens) == request.stop_at:
                self._deliver("detokenizer", engine, messages.StopStream(stream, len(tokens)))
        for end in step.ends:
            name, _, choice = replica.streams.pop(end.stream)
            request = self.requests[name]
            assert choice not in request.ended, "it ends twice"
            request.ended[choice] = end.reason
            del request.tokens[choice][end.num_tokens :]

    # Lives and deaths

    def _begin(self) -> None:
        """A new life of all replicas."""
        self.down = False
        self.life += 1
        self.replicas = [_Replica(engine, self.config) for engine in range(self.num)]
        for engine, replica in enumerate(self.replicas):
            ready = replica.runner.load(lambda *_: None)
            self._deliver("worker", engine, ready)
        for request in self.requests.values():
            if request.arrived:
                self._submit(request)

    def _kill_replicas(self) -> None:
        if self.down:
            return
        self.counts["deaths of all replicas"] += 1
        self.down = True
        self._retire()
        for request in self.requests.values():
            request.incarnation += 1
            if request.aborted:
                request.ended |= dict.fromkeys(set(request.tokens) - set(request.ended), "abort")
            elif request.ended.keys() != request.tokens.keys():
                self.counts["handed over"] += 1
        session = self.session
        if self.coordinator is not None:  # answers before they are started again
            self._lose_all(session)
            heard = max(self._arrivals["coordinator", e, session] for e in range(self.num))
            self.clock.after(heard - self.clock.now + 0.01, self._begin)
        else:
            self.late_losses = True
            self.clock.after(self.rng.random() * 0.04, self._begin)

    def _lose_all(self, session: int) -> None:
        """The coordinator hears of it after all that they have said."""
        for engine in range(self.num):
            way, lost = ("coordinator", engine, session), (f"scheduler.{engine}", PeerLost())
            self._late(way, 1e-4, self._coordinator_hears, session, *lost)

    def _retire(self) -> None:
        for replica in self.replicas:
            statistics = replica.core.statistics()
            for name in ("preemptions", "dummy_steps", "waves", "overshoot_tokens"):
                self.counts[name] += int(statistics[name])

    def _start_coordinator(self) -> None:
        """Starting, it hears nothing; what is sent to it waits."""
        self.session += 1
        self.heard.clear()
        self.late_losses = False
        self.clock.after(self.rng.random() * 0.04, self._coordinator_ready, self.session)

    def _coordinator_ready(self, session: int) -> None:
        self.coordinator = CoordinatorCore(self.num, lockstep=True)
        self._coordinator_acts(self.coordinator.flush(self.clock.now))
        if self.late_losses:
            self._lose_all(session)
        while self.heard and self.coordinator is not None:
            self._coordinator_hears(session, *self.heard.popleft())

    def _coordinator_hears(self, session: int, source: str, message: Any) -> None:
        if session != self.session:
            return
        if self.coordinator is None:
            self.heard.append((source, message))
            return
        now = self.clock.now
        sends = self.coordinator.handle(source, message, now)
        if self._coordinator_acts(sends):
            self._coordinator_acts(self.coordinator.flush(now))

    def _coordinator_acts(self, sends: Any) -> bool:
        """Returns whether it has lived to do all of it."""
        send: Send
        for send in sends:
            kind, _, number = send.to.partition(".")
            if kind == "scheduler" and not self.down:
                self._deliver(f"coordinator {self.session}", int(number), send.message)
            if self.counts["deaths of the coordinator"] < 3 and self.rng.random() < 0.003:
                self._kill_coordinator()
                return False
        return True

    def _kill_coordinator(self) -> None:
        """What it has said is heard before its loss, and before the next one speaks."""
        if self.coordinator is None:
            return
        self.counts["deaths of the coordinator"] += 1
        self.coordinator = None
        source, last = f"coordinator {self.session}", self.clock.now
        self.session += 1  # nobody hears what is still on its way to it
        if not self.down:
            for engine in range(self.num):
                way, life = (source, engine, self.life), self.life
                lost = (life, "coordinator.0", engine, PeerLost())
                self._late(way, 1e-4, self._scheduler_hears, *lost)
                last = max(last, self._arrivals[way])
        self.clock.after(last - self.clock.now + 1e-5, self._start_coordinator)

    # At rest

    def _check(self) -> None:
        assert self.coordinator is not None
        assert not self.down
        waves = set()
        for replica in self.replicas:
            assert replica.place is None, "it waits in a meeting that others don't come to"
            assert not replica.plans
            assert not replica.busy
            core = replica.core
            core.check()
            assert core.num_steps_in_flight == core.num_unfinished == 0
            statistics = core.statistics()
            assert statistics["free_blocks"] == statistics["num_blocks"] - 1
            assert core._waves is not None
            assert core._waves.paused, "a wave hasn't ended"
            waves.add((statistics["waves"], statistics["steps"], replica.meetings))
        assert len(waves) == 1, waves
        for request in self.requests.values():
            request.check()
        self._retire()


def run(seed: int, replicas: int | None = None) -> Result:
    time = types.SimpleNamespace(perf_counter=lambda: 0.0, sleep=lambda seconds: None)
    with mock.patch("ringcast.executor.fake_runner.time", time):
        return Lockstep(seed, replicas).run()
