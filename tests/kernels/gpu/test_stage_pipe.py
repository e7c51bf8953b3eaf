"""What a stage hands to the next one, against the reference: both ends on one device."""

from __future__ import annotations

import threading

import pytest
import torch
from interpreted_triton import ON_GPU
from kernels.gpu.devices import DEVICE, DTYPES

from ringcast.kernels.gpu import stage_pipe
from ringcast.kernels.gpu.stage_pipe import (
    Pipe,
    add_update,
    add_update_reference,
    memory_bytes,
    receive,
    send,
)

LAST = 2**31 - 1  # counts wrap here
EPS = 1e-5


@pytest.fixture(autouse=True)
def _few_programs(monkeypatch):
    torch.manual_seed(0)
    if not ON_GPU:  # the interpreter is slow by programs
        monkeypatch.setattr(stage_pipe, "PROGRAMS", 3)


class Ends:
    """Of a pipe, on one device. launched: items that there were before."""

    def __init__(self, rows, size, dtype=torch.float32, slots=2, launched=0):
        row_bytes = torch.empty(0, dtype=dtype).itemsize * size
        num_bytes = memory_bytes(slots, rows, row_bytes)
        self.memory = torch.zeros(2, -(-num_bytes // 256) * 256, dtype=torch.uint8, device=DEVICE)
        flags = self.memory[:, : stage_pipe.FLAGS_BYTES].view(torch.int32)
        programs = stage_pipe.PROGRAMS
        self.taken = flags[0, programs : 2 * programs]  # in the sender's memory
        self.sent = flags[1, :programs]  # in the receiver's
        self.ring = self.memory[1, stage_pipe.FLAGS_BYTES : num_bytes].view(dtype)
        self.taken[:], self.sent[:] = launched, launched
        outbox, inbox = (torch.tensor([row.data_ptr()], device=DEVICE) for row in self.memory)
        self.sender, self.receiver = (
            Pipe(
                inbox,
                outbox,
                torch.full((programs,), launched, dtype=torch.int32, device=DEVICE),
                slots,
                rows,
            )
            for _ in range(2)
        )


def random(*shape, dtype=torch.float32):
    return torch.randn(shape, device=DEVICE).to(dtype)


def poison(*shape, dtype=torch.float32):
    return torch.full(shape, float("nan"), dtype=dtype, device=DEVICE)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "size"), [(1, 64), (7, 577)])
@pytest.mark.parametrize("kind", ["whole", "update", "normed update"])
def test_the_residual_stream_arrives_with_its_update(kind, rows, size, dtype):
    ends = Ends(rows, size, dtype)
    residual, extra = random(rows, size, dtype=dtype), ()
    if kind != "whole":
        extra = (random(rows, size, dtype=dtype), random(size) if kind != "update" else None, EPS)
    send(ends.sender, residual, *extra)
    out, same, want = (poison(rows, size, dtype=dtype) for _ in range(3))
    receive(ends.receiver, out)
    add_update(residual, same, *extra)
    assert torch.equal(out, same)
    add_update_reference(residual, want, *extra)
    tolerance = 0 if kind != "normed update" else {torch.float32: 2e-6}.get(dtype, 1.6e-2)
    torch.testing.assert_close(out, want, rtol=tolerance, atol=tolerance)
    assert (ends.sent == 1).all()
    assert (ends.taken == 1).all()


@pytest.mark.parametrize("slots", [1, 4])
def test_items_come_in_order_however_many_are_ahead(slots):
    """And though both pad a step to other numbers of rows; rows of the residual are far apart."""
    ends, waiting, received = Ends(8, 16, slots=slots), [], 0
    for item in range(9):
        residual = random(8, 32)[: 1 + item % 4, :16]
        waiting.append(residual)
        send(ends.sender, residual)
        while waiting and (len(waiting) == slots or item == 8):
            want, more = waiting.pop(0), received % 3
            out = poison(8, 32)[:, :16]
            receive(ends.receiver, out[: len(want) + more])
            received += 1
            assert torch.equal(out[: len(want)], want)
            assert not out[: len(want) + more].isnan().any()
            assert out[len(want) + more :].isnan().all()
    assert received == 9


@pytest.mark.filterwarnings("ignore:overflow encountered")  # numpy's, under the interpreter
@pytest.mark.parametrize("before", [LAST - 1, LAST])
def test_counts_wrap(before):
    ends = Ends(2, 16, launched=before)
    for _ in range(4):
        x, out = random(2, 16), poison(2, 16)
        send(ends.sender, x)
        receive(ends.receiver, out)
        assert torch.equal(out, x)


def test_a_pipe_that_is_shut_does_nothing():
    ends = Ends(2, 16)
    out = poison(2, 16)
    for _ in range(3):
        send(ends.sender, random(2, 16), random(2, 16), is_open=False)
        receive(ends.receiver, out, is_open=False)
    assert out.isnan().all()
    assert not ends.memory.any()
    assert not ends.sender.launches.any()
    assert not ends.receiver.launches.any()


@pytest.mark.interpreted  # on a device it is one stream, which would wait for itself
@pytest.mark.parametrize("who", ["sender", "receiver"])
def test_nobody_overtakes(who):
    """A sender without room writes nothing, and a receiver without an item reads nothing."""
    ends = Ends(3, 16)
    x, out = random(3, 16), poison(3, 16)
    if who == "sender":
        for _ in range(2):
            send(ends.sender, x)
        flag, launch = ends.taken, lambda: send(ends.sender, x + 1)
    else:
        flag, launch = ends.sent, lambda: receive(ends.receiver, out)
        ends.ring[: x.numel()] = x.flatten() + 1
    before = ends.ring.clone()
    thread = threading.Thread(target=launch)
    thread.start()
    thread.join(0.3)
    assert thread.is_alive()
    assert torch.equal(ends.ring, before)
    assert out.isnan().all()
    flag[:] = 1
    thread.join(60)
    assert not thread.is_alive()
    done = ends.ring[: x.numel()].view(3, 16) if who == "sender" else out
    assert torch.equal(done, x + 1)


def test_rows_of_what_is_added_may_be_far_apart():
    residual, update, out = random(5, 40)[:, :16], random(5, 24)[:, 8:], poison(5, 32)
    add_update(residual, out[:, :16], update)
    assert torch.equal(out[:, :16], residual + update)
    assert out[:, 16:].isnan().all()
    with pytest.raises(ValueError, match=r"out is \(5, 32\).*must be \(5, 16\)"):
        add_update(residual, out)


def test_what_doesnt_fit_is_refused():
    ends, x = Ends(2, 16), random(3, 16)
    with pytest.raises(ValueError, match="residual has 3 rows of 16; at most 2 of"):
        send(ends.sender, x)
    with pytest.raises(ValueError, match=r"update is \(1, 16\); it must be \(2, 16\)"):
        send(ends.sender, x[:2], x[:1])
    with pytest.raises(ValueError, match="out has 3 rows"):
        receive(ends.receiver, x)
    with pytest.raises(ValueError, match="in one piece"):
        receive(ends.receiver, x.T[:2])
    with pytest.raises(ValueError, match="3 slots; it must be a power of two"):
        receive(ends.receiver._replace(slots=3), x[:2])
