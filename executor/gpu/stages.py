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

A worker's memory that the others have mapped: what the ranks of its stage exchange (parallel.py),
if there are several, then its end of the pipes. It is of one size everywhere, so the first stage
has a ring that nobody uses.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch

from ...kernels.gpu import stage_pipe as kernels
from ...kernels.gpu.all_reduce import ALIGNMENT
from ...mq.config import EngineConfig
from ...mq.messages import NewSequence, StepPlan
from ..sampled_tokens import Tokens
from ..stages import WHOLE, Position
from .batch import GpuBatch, Ints
from .devices import check_access, check_ranks
from .parallel import Alone, DeviceGroup, Layout, Memory, PeerGroup, Shape, map_devices, meet
from .token_mail import TokenMail, mail_bytes

Pipe = kernels.Pipe


class GpuStage:
    """position: among all. inlet, outlet: its ends of the pipes. mail: of sampled tokens; with
    ranks, those of the last stage but the first have none, and need none.

    Its pipes are shut until `open`: what is launched before, to warm up, is launched by each stage
    for itself.
    """

    def __init__(
        self,
        position: Position = WHOLE,
        inlet: Pipe | None = None,
        outlet: Pipe | None = None,
        mail: TokenMail | None = None,
        memory: torch.Tensor | None = None,
        close: Callable[[], None] | None = None,
    ) -> None:
        """memory: this worker's, which is there as long as its stage."""
        self.is_first, self.is_last = position.is_first, position.is_last
        self._inlet, self._outlet = inlet, outlet
        self._mail, self._memory, self._close = mail, memory, close
        self._is_open = False
        self._tokens: Tokens | None = None

    # --- the residual stream

    def open(self) -> None:
        self._is_open = True

    def receive(self, out_TH: torch.Tensor, pdl: bool) -> None:
        """Not on the first stage."""
        assert self._inlet is not None
        kernels.receive(self._inlet, out_TH, is_open=self._is_open, pdl=pdl)

    def send(
        self,
        residual_TH: torch.Tensor,
        update_TH: torch.Tensor | None,
        update_weight_H: torch.Tensor | None,
        eps: float,
        pdl: bool,
    ) -> None:
        """Not on the last stage. update: what is still to be added, or None."""
        assert self._outlet is not None
        kernels.send(
            self._outlet,
            residual_TH,
            update_TH,
            update_weight_H,
            eps,
            is_open=self._is_open,
            pdl=pdl,
        )

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

    def leave(self) -> None:
        if self._mail is not None:
            self._mail.leave()
        if self._close is not None:
            self._close()


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
    """Where a worker is, and what it shares with the others."""

    def __init__(self, config: EngineConfig, worker: int, shape: Shape, has_long: bool) -> None:
        self.stages, self.ranks = config.pipeline_parallel_size, config.tensor_parallel_size
        self.worker, self.workers = worker, config.num_workers
        self.number, self.rank = divmod(worker, self.ranks)
        self.position = Position(self.number, self.stages)
        self.shape = shape
        self.layout = Layout(shape, self.ranks, has_long) if self.ranks > 1 else None
        self.slots = 1 << (config.most_steps_in_flight - 1).bit_length()
        self._pipe = _rounded(self.layout.num_bytes if self.layout else 0, ALIGNMENT)
        row = shape.hidden * shape.dtype.itemsize
        self.num_bytes = self._pipe + kernels.memory_bytes(self.slots, shape.tokens, row)
        readers = (self.stages - 1) * self.ranks
        self.mail = readers, config.most_steps_in_flight, shape.samples
        self.timeout = config.startup_timeout

    @property
    def is_output(self) -> bool:
        return self.position.is_last and not self.rank

    def open_mail(self, memory_fd: int, offset: int = 0) -> TokenMail | None:
        """None for who has none."""
        if self.position.is_last and self.rank:
            return None
        reader = None if self.position.is_last else self.worker
        return TokenMail(memory_fd, self.mail, reader, self.timeout, offset)

    def place(
        self,
        memory: Memory,
        mail: TokenMail | None,
        add_up: Callable[[torch.Tensor], None] | None = None,
        close: Callable[[], None] | None = None,
    ) -> Place:
        """memory: of all workers. add_up: a tensor of the stage's ranks."""
        group: DeviceGroup | Alone = Alone()
        if self.layout is not None:
            first = self.number * self.ranks
            own = memory.own[: self.layout.num_bytes]
            peers = Memory(own, memory.addresses[first : first + self.ranks])
            group = PeerGroup(self.rank, self.shape, self.layout, peers, add_up)
        inlet = outlet = None
        if not self.position.is_first:
            inlet = self._end(memory, self.worker - self.ranks)
        if not self.position.is_last:
            outlet = self._end(memory, self.worker)
        stage = GpuStage(self.position, inlet, outlet, mail, memory.own, close)
        return Place(group, stage)

    def _end(self, memory: Memory, sender: int) -> Pipe:
        device = memory.own.device
        inbox, outbox = (
            torch.tensor([memory.addresses[worker] + self._pipe], device=device)
            for worker in (sender + self.ranks, sender)
        )
        launches = torch.zeros(kernels.PROGRAMS, dtype=torch.int32, device=device)
        return Pipe(inbox, outbox, launches, self.slots, self.shape.tokens)


def join_devices(
    config: EngineConfig, worker: int, group_fd: int, shape: Shape, device: torch.device
) -> Place:
    """Workers find each other in an anonymous file, empty at first, that only they have."""
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
    add_up = _sums_of_stage(plan) if plan.ranks > 1 else None
    return plan.place(mapped.memory, mail, add_up, mapped.close)


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


def _sums_of_stage(plan: Plan) -> Callable[[torch.Tensor], None]:
    import torch.distributed as dist

    # All workers make the groups of all stages.
    groups = [
        dist.new_group(list(range(stage * plan.ranks, (stage + 1) * plan.ranks)))
        for stage in range(plan.stages)
    ]
    return partial(dist.all_reduce, group=groups[plan.number])


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
