"""The experts that a rank has on its device, as the balancer sees them (../expert_balancer.py).

All of it is enqueued between two steps on the stream on which everything runs, and no host waits
for a device. What a host must know (how many tokens experts have had, where rank 0 wants them) is
copied to it, and read `delay` steps later: a runner has fewer than that in flight, so the copy is
over by then, on all ranks.

Weights go from device to device by NCCL, in pieces of one expert.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch

from ..expert_balancer import Steps, Transfer
from .experts import Mixtures


class Parcel(NamedTuple):
    """A tensor in one piece, and the rank that it goes to, or comes from."""

    tensor: torch.Tensor
    rank: int


class Carrier(Protocol):
    """Between the ranks that experts are dealt to, in the order of each one's stream."""

    def broadcast(self, values: torch.Tensor) -> None:
        """Values become those of rank 0."""

    def exchange(self, sent: Sequence[Parcel], received: Sequence[Parcel]) -> None:
        """Parcels from one rank to another arrive in the order in which they are sent. Ranks that
        have none needn't call.
        """


class GroupCarrier:
    """By the group of all processes that torch.distributed knows, which has been joined by now
    (joining.py).
    """

    def broadcast(self, values: torch.Tensor) -> None:
        import torch.distributed as dist

        dist.broadcast(values, 0)

    def exchange(self, sent: Sequence[Parcel], received: Sequence[Parcel]) -> None:
        import torch.distributed as dist

        calls = [dist.P2POp(dist.isend, *parcel) for parcel in sent]
        calls += [dist.P2POp(dist.irecv, *parcel) for parcel in received]
        for work in dist.batch_isend_irecv(calls) if calls else ():
            work.wait()  # of a device the stream waits, not the host


class HostCopy:
    """Of a small tensor, as it is when the stream comes to it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._copied: torch.cuda.Event | None = None
        if not tensor.is_cuda:
            self._host = tensor.clone()
            return
        self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self._host.copy_(tensor, non_blocking=True)
        self._copied = torch.cuda.Event()
        self._copied.record()

    def read(self) -> np.ndarray:
        """Waits for the copy, if it isn't over yet."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._host.numpy()


class DeviceExperts:
    """DealtExperts. delay: more steps than a runner ever has in flight."""

    def __init__(self, mixtures: Mixtures, carrier: Carrier, delay: int) -> None:
        self.rank, self.routes = mixtures.rank, mixtures.routes
        self._mixtures, self._carrier, self._delay = mixtures, carrier, delay
        self._weights = [(each.gate_up_ENH, each.down_EHI) for each in mixtures.weights]
        self._staged = [torch.empty_like(weight) for weight in self._weights[0]]
        self.expert_bytes = sum(weight[0].nbytes for weight in self._staged)
        device, slots = self._staged[0].device, self.routes[0].placement_RS.size
        self._shared = torch.zeros(slots, dtype=torch.int32, device=device)
        self._timers: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._meet(len(self.routes[0].placement_RS))

    def _meet(self, size: int) -> None:
        """With all others once: what their connections take is there before memory is measured."""
        others = [rank for rank in range(size) if rank != self.rank]
        sent, received = torch.zeros_like(self._shared), torch.zeros_like(self._shared)
        self._carrier.broadcast(self._shared)
        self._carrier.exchange(
            [Parcel(sent, rank) for rank in others], [Parcel(received, rank) for rank in others]
        )

    def note_loads(self) -> HostCopy:
        return HostCopy(self._mixtures.loads_LE)

    def loads_between(self, begin: HostCopy | None, end: HostCopy) -> Steps[np.ndarray]:
        yield from self._wait()
        loads_LE = self._mixtures.loads_of(end.read())
        return loads_LE if begin is None else loads_LE - self._mixtures.loads_of(begin.read())

    def share(self, values: np.ndarray) -> Steps[None]:
        if not self.rank:
            source = torch.from_numpy(values)
            source = source.pin_memory() if self._shared.is_cuda else source
            self._shared.copy_(source, non_blocking=True)
        self._carrier.broadcast(self._shared)
        heard = HostCopy(self._shared)
        yield from self._wait()
        values[:] = heard.read()

    def send(self, layer: int, transfers: list[Transfer]) -> None:
        sent, received = [], []
        for transfer in transfers:
            for weight, staged in zip(self._weights[layer], self._staged, strict=True):
                if self.rank == transfer.root:
                    sent += [Parcel(weight[transfer.slot], taker) for taker in transfer.takers]
                elif self.rank in transfer.takers:
                    slot = transfer.takers[self.rank]
                    received.append(Parcel(staged[slot], transfer.root))
        begun = self._mark()
        self._carrier.exchange(sent, received)
        self._time_since(begun)

    def take(self, layer: int, slots: list[int], placement_RS: np.ndarray) -> None:
        begun = self._mark()
        for weight, staged in zip(self._weights[layer], self._staged, strict=True):
            for slot in slots:
                weight[slot].copy_(staged[slot])
        self._time_since(begun)
        self._mixtures.take(layer, placement_RS)

    def waited(self) -> float:
        seconds = 0.0
        while self._timers and self._timers[0][1].query():
            begun, ended = self._timers.pop(0)
            seconds += begun.elapsed_time(ended) / 1000
        return seconds

    def _wait(self) -> Steps[None]:
        for _ in range(self._delay):
            yield

    def _mark(self) -> torch.cuda.Event | None:
        if not self._shared.is_cuda:
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _time_since(self, begun: torch.cuda.Event | None) -> None:
        ended = self._mark()
        if begun is not None and ended is not None:
            self._timers.append((begun, ended))
