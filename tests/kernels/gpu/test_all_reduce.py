"""What ranks add up and tell each other, against references: one rank after the other, each as if
all others had come already.
"""

from __future__ import annotations

import pytest
import torch
from kernels.gpu.devices import DEVICE, DTYPES

from ringcast.kernels.gpu.all_reduce import (
    ALIGNMENT,
    FLAGS_BYTES,
    MOST_PROGRAMS,
    Peers,
    all_reduce,
    all_reduce_add_rms_norm,
    all_reduce_add_rms_norm_reference,
    all_reduce_reference,
    broadcast,
    gather_columns,
    gather_rows,
)

TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
PLACE = FLAGS_BYTES + 3 * ALIGNMENT
LAST = 2**31 - 1  # epochs wrap here


class Ranks:
    """Memory of each on one device. Every launch of the others has happened before; `announced` is
    what a rank told another. epoch: how many launches there were before.
    """

    def __init__(self, size: int, num_bytes: int, epoch: int = 0) -> None:
        self.size, self.epoch = size, epoch
        num_bytes = PLACE + -(-num_bytes // ALIGNMENT) * ALIGNMENT
        self.memory = torch.zeros(size, num_bytes, dtype=torch.uint8, device=DEVICE)
        addresses = [row.data_ptr() for row in self.memory]
        self.peers = [
            Peers(
                rank,
                torch.tensor(addresses, dtype=torch.int64, device=DEVICE),
                torch.full((MOST_PROGRAMS,), epoch, dtype=torch.int32, device=DEVICE),
            )
            for rank in range(size)
        ]
        self._flags = self.memory[:, :FLAGS_BYTES].view(torch.int32)
        self._flags = self._flags[:, : MOST_PROGRAMS * size].view(size, MOST_PROGRAMS, size)
        self._flags[:] = _wrapped(epoch + 2)

    def put(self, parts: list[torch.Tensor]) -> None:
        for row, part in zip(self.memory, parts, strict=True):
            row[PLACE : PLACE + part.nbytes] = part.contiguous().view(torch.uint8).flatten()

    def check(self, rank: int, programs: int, meetings: int = 1) -> None:
        """That this rank has told all others that it has come, once for each program."""
        assert (self.peers[rank].counters[:programs] == _wrapped(self.epoch + meetings)).all()
        assert (self.peers[rank].counters[programs:] == _wrapped(self.epoch)).all()
        for other in range(self.size):
            if other != rank:
                told = self._flags[other, :, rank]
                assert (told[:programs] == _wrapped(self.epoch + meetings)).all()
                told[:] = _wrapped(self.epoch + 2)


def _wrapped(epoch: int) -> int:
    return (epoch + 2**31) % 2**32 - 2**31


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype)


def poison(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.full(shape, float("nan"), dtype=dtype, device=DEVICE)


def assert_close(got: torch.Tensor, want: torch.Tensor) -> None:
    tolerance = TOLERANCE[got.dtype]
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("size", "tokens", "hidden"), [(2, 1, 64), (3, 5, 577), (2, 7, 1024)])
@pytest.mark.parametrize("adds", [False, True])
def test_all_reduce(size, tokens, hidden, adds, dtype):
    parts = [random(tokens, hidden, dtype=dtype) for _ in range(size)]
    ranks = Ranks(size, parts[0].nbytes)
    ranks.put(parts)
    residual = random(tokens, hidden, dtype=dtype) if adds else None
    want = poison(tokens, hidden, dtype=dtype)
    all_reduce_reference(parts, want, residual)
    results = []
    for peers in ranks.peers:
        out = poison(tokens, hidden, dtype=dtype) if residual is None else residual.clone()
        all_reduce(peers, PLACE, out, None if residual is None else out)
        assert_close(out, want)
        ranks.check(peers.rank, -(-out.numel() // 2048))
        results.append(out)
    assert all(torch.equal(result, results[0]) for result in results)


def test_long_messages_are_shared_by_few_programs():
    parts = [random(300, 1000) for _ in range(2)]
    ranks = Ranks(2, parts[0].nbytes)
    ranks.put(parts)
    out = poison(300, 1000, dtype=torch.float32)
    all_reduce(ranks.peers[1], PLACE, out)
    torch.testing.assert_close(out, parts[0] + parts[1], rtol=0, atol=0)
    ranks.check(1, 128)


@pytest.mark.filterwarnings("ignore:overflow encountered")  # numpy's, under the interpreter
@pytest.mark.parametrize("epoch", [LAST - 1, LAST])
def test_epochs_wrap(epoch):
    parts = [random(2, 64) for _ in range(2)]
    ranks = Ranks(2, parts[0].nbytes, epoch)
    ranks.put(parts)
    out = poison(2, 64, dtype=torch.float32)
    all_reduce(ranks.peers[0], PLACE, out)
    assert_close(out, parts[0] + parts[1])
    ranks.check(0, 1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("update_norm", [False, True])
@pytest.mark.parametrize(("size", "tokens", "hidden"), [(2, 1, 64), (3, 4, 577)])
def test_all_reduce_add_rms_norm(size, tokens, hidden, update_norm, dtype):
    parts = [random(tokens, hidden, dtype=dtype) for _ in range(size)]
    ranks = Ranks(size, parts[0].nbytes)
    ranks.put(parts)
    residual, weight = random(tokens, hidden, dtype=dtype), random(hidden)
    extra = {"update_weight_H": random(hidden)} if update_norm else {}
    want, summed = poison(tokens, hidden, dtype=dtype), residual.clone()
    all_reduce_add_rms_norm_reference(parts, summed, weight, want, 1e-6, **extra)
    results = []
    for peers in ranks.peers:
        out, stream = poison(tokens, hidden, dtype=dtype), residual.clone()
        all_reduce_add_rms_norm(peers, PLACE, stream, weight, out, 1e-6, **extra)
        assert_close(stream, summed)
        assert_close(out, want)
        ranks.check(peers.rank, tokens)
        results.append((stream, out))
    for stream, out in results:
        assert torch.equal(stream, results[0][0])
        assert torch.equal(out, results[0][1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("size", "rows", "columns"), [(2, 1, 67), (3, 3, 2100)])
def test_columns_come_together_on_rank_0(size, rows, columns, dtype):
    parts = [random(rows, columns, dtype=dtype) for _ in range(size)]
    ranks = Ranks(size, parts[0].nbytes)
    ranks.put(parts)
    out = poison(rows, size * columns, dtype=dtype)
    for peers in ranks.peers:
        gather_columns(peers, PLACE, parts[peers.rank], None if peers.rank else out)
        ranks.check(peers.rank, rows * -(-columns // 2048), meetings=2)
    assert torch.equal(out, torch.cat(parts, 1))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("size", "rows", "columns"), [(2, 1, 64), (3, 5, 577), (2, 7, 1024)])
def test_rows_of_all_come_to_each(size, rows, columns, dtype):
    parts = [random(rows, columns, dtype=dtype) for _ in range(size)]
    ranks = Ranks(size, parts[0].nbytes)
    ranks.put(parts)
    for peers in ranks.peers:
        out = poison(size, rows, columns, dtype=dtype)
        gather_rows(peers, PLACE, out)
        assert torch.equal(out, torch.stack(parts))
        ranks.check(peers.rank, size * -(-rows * columns // 2048))


def test_a_part_of_the_rows_is_added_up():
    """As a replica has it: of what all have computed, its own rows."""
    parts = [random(6, 64) for _ in range(2)]
    ranks = Ranks(2, parts[0].nbytes)
    ranks.put(parts)
    out = poison(3, 64, dtype=torch.float32)
    all_reduce(ranks.peers[1], PLACE + 3 * 64 * 4, out)
    torch.testing.assert_close(out, (parts[0] + parts[1])[3:], rtol=0, atol=0)


def test_tokens_of_rank_0_go_to_all():
    ranks = Ranks(3, 4 * 6)
    values = [torch.full((5,), 10 * rank, dtype=torch.int32, device=DEVICE) for rank in range(3)]
    values[0] += torch.arange(5, device=DEVICE)
    values[0][4] = -7
    for peers in ranks.peers:
        broadcast(peers, PLACE, values[peers.rank][:4], 6)
    for rank in range(3):
        assert values[rank].tolist() == [0, 1, 2, 3, -7 if rank == 0 else 10 * rank]
    ranks.check(0, 1)


def test_what_doesnt_fit_is_refused():
    ranks = Ranks(2, 1024)
    peers, x, norm = ranks.peers[0], random(2, 64), random(64)
    with pytest.raises(ValueError, match="multiple of 16, after"):
        all_reduce(peers, 0, x)
    with pytest.raises(ValueError, match=r"add_to is \(1, 64\)"):
        all_reduce(peers, PLACE, x, x[:1])
    with pytest.raises(ValueError, match="contiguous"):
        all_reduce(peers, PLACE, x[:, :32])
    with pytest.raises(ValueError, match="weight"):
        all_reduce_add_rms_norm(peers, PLACE, x, norm[:32], x, 1e-6)
    with pytest.raises(ValueError, match="at most 1024 of 16384"):
        all_reduce_add_rms_norm(peers, PLACE, random(1025, 4), norm, x, 1e-6)
    with pytest.raises(ValueError, match="rank 0 has one"):
        gather_columns(peers, PLACE, x, None)
    with pytest.raises(ValueError, match=r"it must be \(2, 128\)"):
        gather_columns(peers, PLACE, x, x)
    with pytest.raises(ValueError, match="of 2 ranks"):
        gather_rows(peers, PLACE, x[:1])
    with pytest.raises(ValueError, match="int32"):
        broadcast(peers, PLACE, x[0], 64)
