"""A worker's place in a pipeline-parallel engine on CUDA devices, and how workers find each other.

Worker r of P x T is rank r % T of stage r // T, and has device r of its replica's. As on processors
(../pipeline.py has the rules) two things go from worker to worker:

    the residual stream   from each rank of a stage to the same rank of the next one, from device to
                          device, by kernels at the end of one forward pass and at the beginning of
                          the next (kernels/gpu/stage_pipe.py). A slot for each step in flight
    sampled tokens        from the output rank's process to those of the stages before, when it has
                          read them (token_mail.py); these put them into the changes of their next
                          step. Nobody waits: a row comes again when the scheduler knows its token

The host never waits for another stage, so a stage launches all of its steps, as far as plans go.

A worker's memory that the others of its host have mapped: what the ranks of its stage exchange
(parallel.py), if there are several, then its end of the pipes. It is of one size everywhere, so the
first stage has a ring that nobody uses. Workers on several hosts: hosts.py.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch

from ...kernels.gpu import stage_pipe as kernels
from ...kernels.gpu.all_reduce import ALIGNMENT
from ...mq.config import EngineConfig
from ...mq.messages import NewSequence, StepPlan
from ..sampled_tokens import TokenLink, Tokens
from ..stages import WHOLE, Position
from .batch import GpuBatch, Ints
from .devices import check_access, check_ranks
from .parallel import Alone, DeviceGroup, Layout, Memory, PeerGroup, Shape, map_devices, meet
from .token_mail import TokenMail, mail_bytes

Agree = Callable[[int, int], tuple[int, int]]


class StagePipe(Protocol):
    """One end. crosses: the other one is on another host, and takes as many rows of an item. While
    it isn't open, nothing is handed on: see GpuStage.
    """

    crosses: bool

    def receive(self, out_TH: torch.Tensor, is_open: bool, pdl: bool) -> None:
        """The next item."""

    def send(self, item: kernels.Item, is_open: bool, pdl: bool) -> None:
        """With its update added."""


class PeerPipe:
    """Between devices of one host."""

    crosses = False

    def __init__(self, end: kernels.Pipe) -> None:
        self.end = end

    def receive(self, out_TH: torch.Tensor, is_open: bool, pdl: bool) -> None:
        kernels.receive(self.end, out_TH, is_open=is_open, pdl=pdl)

    def send(self, item: kernels.Item, is_open: bool, pdl: bool) -> None:
        kernels.send(self.end, *item, is_open=is_open, pdl=pdl)


class GpuStage:
    """position: among all. inlet, outlet: its ends of the pipes. mail: of sampled tokens; with
    ranks, those of the last stage but the first have none, and need none.

    Its pipes are shut until `open`: what is launched before, to warm up, is launched by each stage
    for itself.
    """

    def __init__(
        self,
        position: Position = WHOLE,
        inlet: StagePipe | None = None,
        outlet: StagePipe | None = None,
        mail: TokenLink | None = None,
        memory: torch.Tensor | None = None,
        leave: Callable[[], None] | None = None,
        agree: Agree | None = None,
    ) -> None:
        """memory: this worker's, which is there as long as its stage. leave, agree: below."""
        self.is_first, self.is_last = position.is_first, position.is_last
        self._inlet, self._outlet = inlet, outlet
        self._mail, self._memory, self._leave, self._agree = mail, memory, leave, agree
        self._is_open = False
        self._tokens: Tokens | None = None

    def agree(self, most_tokens: int, weight_bytes: int) -> tuple[int, int]:
        """Of all workers the fewest tokens and the most bytes, by which graphs are planned, where
        all must have graphs of the same sizes.
        """
        if self._agree is None:
            return most_tokens, weight_bytes
        return self._agree(most_tokens, weight_bytes)

    def leave(self) -> None:
        """After the last step."""
        if self._leave is not None:
            self._leave()

    # --- the residual stream

    @property
    def crosses(self) -> bool:
        """Whether it is handed on by NCCL, on either side."""
        return any(pipe is not None and pipe.crosses for pipe in (self._inlet, self._outlet))

    def open(self) -> None:
        self._is_open = True

    def receive(self, out_TH: torch.Tensor, pdl: bool) -> None:
        """Not on the first stage."""
        assert self._inlet is not None
        self._inlet.receive(out_TH, self._is_open, pdl)

    def send(self, item: kernels.Item, pdl: bool) -> None:
        """Not on the last stage."""
        assert self._outlet is not None
        self._outlet.send(item, self._is_open, pdl)

    # --- tokens

    def bind(self, batch: GpuBatch) -> None:
        if self._mail is not None:
            self._tokens = Tokens(_Heard(batch, self.is_last), self._mail, self.is_last)

    def before(self, plan: StepPlan) -> None:
        """Before a plan is applied: tokens that have come, and all that it needs."""
        if self._tokens is not None:
            self._tokens.before(plan.removed, plan.rows)

    def laid_out(self, sampled: Ints) -> None:
        """A step has been laid out, whose tokens the last stage will sample."""
        if self._tokens is not None and not self.is_last:
            self._tokens.after(sampled, sampled[:0])

    def sampled(self, rows: Ints, tokens: Ints) -> None:
        """The tokens of a step are on this host, of the last stage."""
        if self._tokens is not None:
            self._tokens.after(rows, tokens)


class _Heard:
    """The batch of a stage, as sampled tokens are appended to it: on the last one's devices they
    are by then.
    """

    def __init__(self, batch: GpuBatch, is_last: bool) -> None:
        self._batch, self._is_last = batch, is_last
        self.num_known = batch.num_known

    def append(self, rows: Ints, tokens: Ints) -> None:
        if not self._is_last:
            self._batch.hear(rows, tokens)


class NoSampler:
    """Of a stage before the last one, all of whose steps are plain."""

    def enter(self, new: NewSequence) -> None:
        pass

    def upload(self) -> None:
        pass

    def is_plain(self, rows: Ints) -> bool:
        return True

    def warm_up(self, logits_like: torch.Tensor) -> None:
        pass

    def sample_plain(self, *tensors: torch.Tensor, pdl: bool = False) -> None:
        pass


class Place(NamedTuple):
    """group: the ranks of the worker's stage."""

    group: DeviceGroup | Alone
    stage: GpuStage


class Plan:
    """Where a worker is, and what it shares with the others of its host. members: the ranks of its
    stage, by their numbers among all workers.
    """

    def __init__(
        self,
        config: EngineConfig,
        worker: int,
        shape: Shape,
        has_long: bool,
        here: range | None = None,
    ) -> None:
        """here: the workers of its host; by default all."""
        self.stages, self.ranks = config.pipeline_parallel_size, config.tensor_parallel_size
        self.worker, self.workers = worker, config.num_workers
        self.here = here or range(self.workers)
        self.number, self.rank = divmod(worker, self.ranks)
        self.position = Position(self.number, self.stages)
        self.members = self.members_of(self.number)
        self.stages_here = [
            number for number in range(self.stages) if self.are_here(*self.members_of(number))
        ]
        self.shape = shape
        self.layout = None
        if self.ranks > 1 and self.stages_here:
            self.layout = Layout(shape, self.ranks, has_long)
        self.slots = 1 << (config.most_steps_in_flight - 1).bit_length()
        self._pipe = _rounded(self.layout.num_bytes if self.layout else 0, ALIGNMENT)
        row = shape.hidden * shape.dtype.itemsize
        self.num_bytes = self._pipe + kernels.memory_bytes(self.slots, shape.tokens, row)
        readers = (self.stages - 1) * self.ranks
        self.mail = readers, config.most_steps_in_flight, shape.samples
        self.timeout = config.startup_timeout

    def members_of(self, stage: int) -> range:
        return range(stage * self.ranks, (stage + 1) * self.ranks)

    def are_here(self, *workers: int) -> bool:
        return all(worker in self.here for worker in workers)

    @property
    def is_output(self) -> bool:
        return self.position.is_last and not self.rank

    @property
    def hears(self) -> bool:
        """Whether it has an end of what tokens go through."""
        return self.is_output or not self.position.is_last

    @property
    def reader(self) -> int | None:
        """Its number among those who hear tokens; None for who tells them."""
        return None if self.position.is_last else self.worker

    def open_mail(self, memory_fd: int, offset: int = 0) -> TokenMail | None:
        """None for who has none."""
        if not self.hears:
            return None
        return TokenMail(memory_fd, self.mail, self.reader, self.timeout, offset)

    def place(
        self,
        memory: Memory,
        mail: TokenMail | None,
        add_up: Callable[[torch.Tensor], None] | None = None,
        close: Callable[[], None] | None = None,
    ) -> Place:
        """Of workers on one host. memory: of all. add_up: a tensor of the stage's ranks."""
        group: DeviceGroup | Alone = Alone()
        if self.ranks > 1:
            group = self.group(memory, add_up)
        inlet = None if self.position.is_first else self.inlet(memory)
        outlet = None if self.position.is_last else self.outlet(memory)

        def leave() -> None:
            if mail is not None:
                mail.leave()
            if close is not None:
                close()

        return Place(group, GpuStage(self.position, inlet, outlet, mail, memory.own, leave))

    def group(self, memory: Memory, add_up: Callable[[torch.Tensor], None] | None) -> PeerGroup:
        """The ranks of its stage, which are here."""
        assert self.layout is not None
        own = memory.own[: self.layout.num_bytes]
        first = self.members.start - self.here.start
        peers = Memory(own, memory.addresses[first : first + self.ranks])
        return PeerGroup(self.rank, self.shape, self.layout, peers, add_up)

    def inlet(self, memory: Memory) -> PeerPipe:
        """From the stage before, whose worker is here."""
        return self._end(memory, self.worker - self.ranks)

    def outlet(self, memory: Memory) -> PeerPipe:
        """Likewise to the next stage."""
        return self._end(memory, self.worker)

    def _end(self, memory: Memory, sender: int) -> PeerPipe:
        device = memory.own.device
        inbox, outbox = (
            torch.tensor([memory.addresses[worker - self.here.start] + self._pipe], device=device)
            for worker in (sender + self.ranks, sender)
        )
        launches = torch.zeros(kernels.PROGRAMS, dtype=torch.int32, device=device)
        return PeerPipe(kernels.Pipe(inbox, outbox, launches, self.slots, self.shape.tokens))


def join_devices(
    config: EngineConfig, worker: int, group_fd: int, shape: Shape, device: torch.device
) -> Place:
    """Workers of one host find each other in an anonymous file, empty at first, that only they
    have.
    """
    check_ranks(config.tensor_parallel_size)
    option = f"pipeline_parallel_size = {config.pipeline_parallel_size}"
    check_access(option, device.index - worker, config.num_workers)
    plan = Plan(config, worker, shape, has_long=True)
    store = meet(group_fd, plan.workers, plan.timeout)
    fd = mail_fd(plan, store)
    try:
        mail = plan.open_mail(fd)
        mapped = map_devices(store, worker, plan.workers, plan.num_bytes, device, plan.timeout)
    finally:
        os.close(fd)
    return plan.place(mapped.memory, mail, sums_of_stages(plan), mapped.close)


def mail_fd(plan: Plan, store: Any) -> int:
    """Of the file that tokens go through: the output rank's, which others open as that process has
    it. Nothing is left of it in any folder.
    """
    if not plan.is_output:
        return os.open(store.get("tokens").decode(), os.O_RDWR)
    fd = os.memfd_create("tokens")
    os.ftruncate(fd, mail_bytes(*plan.mail))
    store.set("tokens", f"/proc/{os.getpid()}/fd/{fd}")
    return fd


def sums_of_stages(plan: Plan) -> Callable[[torch.Tensor], None] | None:
    """NCCL's of the worker's stage; None if it isn't whole on this host, or has one rank."""
    import torch.distributed as dist

    if plan.ranks == 1:
        return None
    # All workers here make the groups of all stages.
    first, own = plan.here.start, None
    for stage in plan.stages_here:
        group = dist.new_group([worker - first for worker in plan.members_of(stage)])
        own = group if stage == plan.number else own
    return None if own is None else partial(dist.all_reduce, group=own)


def join_processes(config: EngineConfig, worker: int, group_fd: int, shape: Shape) -> Place:
    """The same of processes whose kernels are interpreted, for tests: without long steps."""
    plan = Plan(config, worker, shape, has_long=False)
    num_bytes = _rounded(plan.num_bytes, mmap.PAGESIZE)
    mail = num_bytes * plan.workers
    os.ftruncate(group_fd, mail + mail_bytes(*plan.mail))
    whole = torch.frombuffer(mmap.mmap(group_fd, mail), dtype=torch.uint8)
    addresses = [whole.data_ptr() + num_bytes * each for each in range(plan.workers)]
    own = whole[num_bytes * worker : num_bytes * (worker + 1)]
    return plan.place(Memory(own, addresses), plan.open_mail(group_fd, mail))


def _rounded(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
