"""What the stages of a pipeline-parallel engine on processors hand on.

Worker r of P x T is rank r % T of stage r // T. Every worker runs every plan, and keeps the whole
batch; a stage runs its layers alone, and has weights and KV cache of these alone. Two things go
from worker to worker, through memory that they share (kernels/cpu/pipe.py):

    the residual stream   from each rank of a stage to the same rank of the next one, for every
                          step with rows
    sampled tokens        from the output rank, the first of the last stage, to all workers of the
                          stages before, for every step that samples

A stage waits for its input, so the steps in flight spread over the stages by themselves. The
scheduler puts a row into a step only when its newest token is known (actors/scheduler/planner.py),
so the tokens that a step needs have been sent before its plan was: nobody waits for them. Those
that a stage doesn't need yet it takes before its next step, so no more are unread than steps are in
flight; the pipe has room for as many.
"""

from __future__ import annotations

import time
from typing import NamedTuple

import numpy as np
import torch

from ..kernels.cpu import exchange, pipe
from ..kernels.cpu.openmp import Kernel, Launch
from ..mq.config import EngineConfig
from ..mq.errors import PeerDeadError
from .mirror import Exchange, Part, Pipe
from .parallel import Alone, Group, HostGroup, map_parts
from .stages import WHOLE, Position

KERNELS: tuple[Kernel, ...] = (pipe.send_kernel, pipe.receive_kernel)
_HIDDEN_SLOTS = 2  # a stage computes the next step while the last one is still unread
_NAP_SECONDS = 20e-6
_WORDS = exchange.LINE // 8


class Link:
    """One process's end of a pipe: the writer's, or that of reader number `reader`.

    Waiting raises PeerDeadError when a rank has left, and TimeoutError.
    """

    def __init__(
        self,
        memory: np.ndarray,
        shape: tuple[int, int, int],
        reader: int | None,
        has_left: np.ndarray,
        timeout: float,
    ) -> None:
        """memory: int64, the pipe's. shape: its readers, its slots, and the numbers in each."""
        readers, slots, words = shape
        self._memory, self._reader, self._slots = memory, reader, slots
        self._has_left, self._timeout = has_left, timeout
        lines = memory[: _WORDS * (1 + readers)].reshape(1 + readers, _WORDS)
        self._sent, self._taken = lines[0], lines[1:, 0]
        self._shape = {"readers": readers, "slots": slots, "slot_bytes": pipe.slot_bytes(words)}

    @property
    def is_ready(self) -> bool:
        """Whether there is an item that this reader has not taken; for the writer, room for one."""
        if self._reader is not None:
            return bool(self._sent[0] > self._taken[self._reader])
        return bool(self._sent[0] < self._taken.min() + self._slots)

    def wait(self) -> None:
        """Until it is ready. To be called before a launch."""
        start = time.monotonic()
        while not self.is_ready:
            if self._has_left[0] and not self.is_ready:  # it may have said something before
                raise PeerDeadError("another stage of the pipeline has left")
            if time.monotonic() - start > self._timeout:
                what = "room" if self._reader is None else "its input"
                raise TimeoutError(f"a stage has waited {self._timeout:g} s for {what}")
            time.sleep(_NAP_SECONDS)

    def bind(self, rows: np.ndarray, x: torch.Tensor) -> Launch:
        """Send the first rows[0] rows of x, of four bytes each, or receive into them."""
        assert x.is_contiguous()
        assert x.itemsize == 4
        common = {"rows": rows, "pipe": self._memory, "width": x.shape[1], "x": x, **self._shape}
        if self._reader is None:
            return pipe.send_kernel.bind(torch.float32, **common)
        return pipe.receive_kernel.bind(torch.float32, **common, reader=self._reader)


class Stage:
    """waited: seconds that the last `wait` took."""

    def __init__(
        self, position: Position = WHOLE, inlet: Link | None = None, outlet: Link | None = None
    ) -> None:
        self.position = position
        self.is_first, self.is_last = position.is_first, position.is_last
        self.waited = 0.0
        self._inlet, self._outlet = inlet, outlet

    def receive(self, rows: np.ndarray, x_TH: torch.Tensor) -> Launch:
        """Not on the first stage."""
        assert self._inlet is not None
        return self._inlet.bind(rows, x_TH)

    def send(self, rows: np.ndarray, x_TH: torch.Tensor) -> Launch:
        """Not on the last stage."""
        assert self._outlet is not None
        return self._outlet.bind(rows, x_TH)

    def wait(self) -> None:
        """Until a step's operations have nothing to wait for."""
        start = time.perf_counter()
        for link in (self._inlet, self._outlet):
            if link is not None:
                link.wait()
        self.waited = time.perf_counter() - start


class Place(NamedTuple):
    """A worker's, among all. world: all workers; group: the ranks of its stage."""

    world: Group
    group: Group
    stage: Stage
    tokens: Link | None

    def leave(self) -> None:
        self.world.leave()
        self.group.leave()


def join(
    config: EngineConfig, rank: int, memory_fd: int, hidden_size: int, num_links: int = 0
) -> Place:
    """Meet the others. num_links: with how many hosts this one shares the engine (mirror.py).

    Raises PeerDeadError or TimeoutError if they don't come.
    """
    width, stages = config.tensor_parallel_size, config.pipeline_parallel_size
    timeout, everyone = config.startup_timeout, tuple(range(width * stages))
    if len(everyone) == 1:
        return Place(Alone(), Alone(), Stage(), None)
    if stages == 1:
        (memory,) = map_parts(memory_fd, [Exchange(everyone)], num_links)
        group = HostGroup(rank, width, memory, timeout)
        return Place(group, group, Stage(), None)
    number, own = divmod(rank, width)
    rows = max(config.max_num_batched_tokens, config.max_num_seqs)
    tokens = Pipe(
        everyone[-width], everyone[:-width], config.most_steps_in_flight, config.max_num_seqs
    )
    hidden = [
        Pipe(worker, (worker + width,), _HIDDEN_SLOTS, rows * hidden_size)
        for worker in everyone[:-width]
    ]
    groups = [Exchange(everyone[s * width : (s + 1) * width]) for s in range(stages)]
    parts: list[Part] = [Exchange(everyone), *groups, tokens, *hidden]
    memory = map_parts(memory_fd, parts, num_links)
    world = HostGroup(rank, len(everyone), memory[0], timeout)
    group = Alone() if width == 1 else HostGroup(own, width, memory[1 + number], timeout)
    links = memory[2 + stages :]  # from stage s, rank t: s * width + t

    def link(part: np.ndarray, pipe: Pipe, reader: int | None) -> Link:
        shape = len(pipe.readers), pipe.slots, pipe.words
        return Link(part, shape, reader, world.has_left, timeout)

    position = Position(number, stages)
    inlet = None if position.is_first else link(links[rank - width], hidden[rank - width], 0)
    outlet = None if position.is_last else link(links[rank], hidden[rank], None)
    heard = None
    if not position.is_last:
        heard = link(memory[1 + stages], tokens, rank)
    elif not own:
        heard = link(memory[1 + stages], tokens, None)
    return Place(world, group, Stage(position, inlet, outlet), heard)
