"""A worker: actors/worker.py (`Worker.run`), with the fake runner."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ringcast.actors import topology
from ringcast.executor.fake_runner import FakeModelRunner
from ringcast.executor.lockstep import check_places
from ringcast.mq import codec, messages

from .network import Inbound
from .node import Job, Node
from .scenario import POISON, POISON_AT

if TYPE_CHECKING:
    from .world import World


class WorkerNode(Node):
    """Poisonous prompts kill the one that answers, before it does.

    killers: the requests of which it died. place: in the meeting of replicas that step together,
    where it waits for the others.
    """

    def __init__(self, world: World, name: str, generation: int) -> None:
        self.killers: list[str] = []
        self.place: tuple[int, int, int] | None = None
        self._num_meetings = 0
        self._any_work = False
        super().__init__(world, name, generation)

    def _make(self) -> None:
        config = self.world.scenario.config
        rank = topology.rank_of(self.name, self.world.scenario.counts)
        self._answers = rank == config.output_rank
        self._runner = FakeModelRunner(config, self.world.scenario.spec, rank)
        if config.lockstep:
            self._runner.meet = lambda place, tokens: self._any_work
        self._poisonous: dict[int, tuple[str, list[int]]] = {}
        self._first = [self._runner.load(lambda *_: None)]

    def _next_job(self) -> Job | None:
        if self._orders:
            return self._obey(self._orders.popleft())
        if self._first:
            return self._answer(self._first.pop())
        (inbound,) = self.inbounds
        taken = inbound.take(1)
        return self._step(inbound, taken[0][1]) if taken else None

    def _step(self, inbound: Inbound, plan: Any) -> Job:
        yield self.world.delay(self.world.scenario.step)
        if self._answers:
            self._taste(plan)
        if self.killers:
            self.die("killed by what it computed")
            return
        if plan.wave is not None:
            yield from self._meet(plan.wave)
        output = self._runner.execute(plan)
        if self._answers:
            yield from self._answer(output)
        inbound.commit()
        self.world.wake((inbound.source,))

    def _meet(self, wave: messages.WaveStep) -> Job:
        """Wait until the workers of all replicas have come."""
        self._any_work = wave.has_work
        self.place = (self._num_meetings, wave.wave, wave.step)
        nodes = self.world.supervisor.nodes.values()
        workers = [node for node in nodes if isinstance(node, WorkerNode)]
        if all(worker.place is not None and worker.state == "ready" for worker in workers):
            check_places(np.array([worker.place for worker in workers], np.int32))
            any_work = any(worker._any_work for worker in workers)
            for worker in workers:
                worker.place, worker._any_work = None, any_work
                worker._num_meetings += 1
                worker.wake()
        while self.place is not None:
            yield None

    def _answer(self, message: Any) -> Job:
        (outbox,) = self.outboxes.values()
        payload = codec.encode(message)
        self.world.wire.sent(self, outbox.edge.readers[0], message, payload)
        while not outbox.try_send(payload):
            yield None
        yield self.world.delay(self.world.scenario.pause)

    def _taste(self, plan: messages.StepPlan) -> None:
        """_poisonous, by row: the request; outputs until it kills, tokens until the next output."""
        poisonous = self._poisonous
        for row in codec.ints(plan.removed).tolist():
            poisonous.pop(row, None)
        for new in plan.new:
            tokens = codec.ints(new.token_ids).tolist()
            if tokens[0] == POISON:
                outputs = len(tokens) - new.num_prompt_tokens
                left = len(tokens) - new.num_computed_tokens
                state = [tokens[1] - POISON_AT - outputs, left]
                poisonous[new.row] = new.request_id, state
        rows, counts = codec.ints(plan.rows).tolist(), codec.ints(plan.num_tokens).tolist()
        for row, count in zip(rows, counts, strict=True):
            if row in poisonous:
                request_id, state = poisonous[row]
                state[1] -= count
                if not state[1]:  # it is sampled
                    if not state[0]:
                        self.killers.append(request_id)
                    state[:] = state[0] - 1, 1
