"""The stages of a pipeline-parallel engine: which layers each has, and what they hand on.

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
from collections import Counter, deque
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch

from ..kernels.cpu import exchange, pipe
from ..kernels.cpu.openmp import Kernel, Launch
from ..mq import codec
from ..mq.config import EngineConfig
from ..mq.errors import ConfigError, PeerDeadError
from ..mq.kv_groups import Group as LayerGroup
from ..mq.kv_groups import deal, window_of
from .input_batch import InputBatch
from .mirror import Exchange, Part, Pipe
from .parallel import Alone, Group, HostGroup, map_parts

KERNELS: tuple[Kernel, ...] = (pipe.send_kernel, pipe.receive_kernel)
_HIDDEN_SLOTS = 2  # a stage computes the next step while the last one is still unread
_NAP_SECONDS = 20e-6
_WORDS = exchange.LINE // 8
_ONE = np.ones(1, np.int64)


def split(num_layers: int, stages: int) -> list[range]:
    """The layers of each stage, as even as can be. The first ones have one more, since the last
    one makes the logits. Raises ConfigError if a stage would have none.
    """
    if stages > num_layers:
        raise ConfigError(
            f"pipeline_parallel_size = {stages}: the model has {num_layers} layers, and each stage "
            f"needs one; at most {num_layers} is possible"
        )
    few, more = divmod(num_layers, stages)
    ends = [0, *accumulate(few + (stage < more) for stage in range(stages))]
    return [range(ends[i], ends[i + 1]) for i in range(stages)]


def deal_stage(windows: list[int], layers: range) -> list[LayerGroup]:
    """The model's groups of layers (mq/kv_groups.py) with those of `layers` alone. Every stage has
    the same kinds of groups in the same order, so one block table is right for all; each deals its
    own layers of a kind evenly. A group may have none.
    """
    groups = deal(windows)
    if len(layers) == len(windows):
        return groups
    number = Counter(group.spec for group in groups)
    dealt: list[LayerGroup] = []
    for spec, count in number.items():
        own = [layer for layer in layers if windows[layer] == window_of(spec)]
        size = -(-len(own) // count)
        dealt += [LayerGroup(spec, own[i * size : (i + 1) * size]) for i in range(count)]
    return dealt


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
            if self._has_left[0]:
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
    """Number `number` of `count`. waited: seconds that the last `wait` took."""

    def __init__(
        self,
        number: int = 0,
        count: int = 1,
        inlet: Link | None = None,
        outlet: Link | None = None,
    ) -> None:
        self.number, self.count = number, count
        self.is_first, self.is_last = not number, number == count - 1
        self.waited = 0.0
        self._inlet, self._outlet = inlet, outlet

    def layers(self, num_layers: int) -> range:
        return split(num_layers, self.count)[self.number]

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


class Tokens:
    """What has been sampled, on its way to `batch`: told by the output rank, heard by the stages
    before the last one. With one stage there is no link, and nothing to do.
    """

    def __init__(self, batch: InputBatch, link: Link | None, is_last: bool) -> None:
        self._batch, self._is_last = batch, is_last
        self._sampled: deque[np.ndarray] = deque()  # rows of each step, or -1; not heard yet
        self._awaited = np.zeros(len(batch.num_known), bool)  # rows that are among them
        self._tokens = np.zeros(len(batch.num_known), np.int32)
        self._link = link
        self._launch: Launch | None = None
        if link is not None:
            words = torch.from_numpy(self._tokens.view(np.float32))[None]
            self._launch = link.bind(_ONE, words)

    def before(self, removed: bytes, rows: bytes) -> None:
        """Before a plan is applied: append all that is there, and all that its rows need. What was
        sampled for the removed is dropped.
        """
        if self._is_last or self._link is None:
            return
        gone = codec.ints(removed)
        if len(gone):
            self._awaited[gone] = False
            for sampled in self._sampled:
                sampled[np.isin(sampled, gone)] = -1
        needed = codec.ints(rows)
        while self._sampled and (self._link.is_ready or self._awaited[needed].any()):
            self._link.wait()
            self._run()
            sampled = self._sampled.popleft()
            places = np.flatnonzero(sampled >= 0)
            self._batch.append(sampled[places], self._tokens[places])
            self._awaited[sampled[places]] = False

    def after(self, sampled: np.ndarray, tokens: np.ndarray) -> None:
        """After a step: tell what was sampled, or note what is to be heard."""
        if self._is_last:
            self._batch.append(sampled, tokens)
            if self._link is not None and len(sampled):
                self._tokens[: len(tokens)] = tokens
                self._link.wait()
                self._run()
        elif len(sampled):
            self._sampled.append(sampled.copy())
            self._awaited[sampled] = True

    def _run(self) -> None:
        assert self._launch is not None
        self._launch()


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

    is_first, is_last = not number, number == stages - 1
    inlet = None if is_first else link(links[rank - width], hidden[rank - width], 0)
    outlet = None if is_last else link(links[rank], hidden[rank], None)
    heard = None
    if not is_last:
        heard = link(memory[1 + stages], tokens, rank)
    elif not own:
        heard = link(memory[1 + stages], tokens, None)
    return Place(world, group, Stage(number, stages, inlet, outlet), heard)
