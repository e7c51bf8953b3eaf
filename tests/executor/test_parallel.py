"""Ranks that share memory, as threads of one process."""

from __future__ import annotations

import os
import threading

import numpy as np
import pytest
import torch

from ringcast.executor.parallel import HostGroup, map_memory
from ringcast.kernels.cpu import exchange
from ringcast.kernels.cpu.exchange import SLOT_WORDS
from ringcast.mq.errors import PeerDeadError


@pytest.fixture
def memory_fd():
    fd = os.memfd_create("ranks")
    yield fd
    os.close(fd)


def on_every_rank(size, memory_fd, act, timeout=30.0, here=None, num_threads=2):
    """What act(group) returns on each of the first `here` ranks; the first exception is raised."""
    here = size if here is None else here
    results, errors = [None] * here, []

    def run(rank):
        torch.set_num_threads(num_threads)
        try:
            memory = map_memory(memory_fd, exchange.memory_bytes(size))
            results[rank] = act(HostGroup(rank, size, memory, timeout))
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(here)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results


def rows_of(rank, call, rows, width):
    generator = torch.Generator().manual_seed(1000 * call + rank)
    return torch.randn(rows, width, generator=generator)


SHAPES = [
    (1, 1),
    (3, 40),
    (1, SLOT_WORDS + 3),
    (5, 2 * SLOT_WORDS),
    (300, 64),
    (0, 8),
    (700, 100),
    (2, 9),
]


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("size", [2, 3])
def test_sums_have_the_same_bits_everywhere(memory_fd, size, threads):
    def act(group):
        assert group._lanes == threads
        sums = []
        for call, (rows, width) in enumerate(SHAPES * 3):
            x = torch.full((rows + 1, width), torch.nan)
            x[:rows] = rows_of(group.rank, call, rows, width)
            (launch,) = group.sum(np.array([rows]), x)
            launch()
            group.check()
            assert x[rows:].isnan().all()  # only so many rows
            sums.append(x[:rows])
        return sums

    results = on_every_rank(size, memory_fd, act, num_threads=threads)
    for call, (rows, width) in enumerate(SHAPES * 3):
        want = exchange.exchange(
            [rows_of(rank, call, rows, width) for rank in range(size)], exchange.SUM
        )
        torch.testing.assert_close(results[0][call], want)
        for result in results:
            assert torch.equal(result[call], results[0][call])


def test_a_row_is_summed_alike_among_any_others(memory_fd):
    def act(group):
        x = rows_of(group.rank, 0, 400, 100)
        alone = x[37:38].clone()
        for rows in (x, alone):
            (launch,) = group.sum(np.array([len(rows)]), rows)
            launch()
        return torch.equal(x[37:38], alone)

    assert all(on_every_rank(4, memory_fd, act))


@pytest.mark.parametrize("root", [0, 2])
def test_one_hands_over_to_those_that_want_it(memory_fd, root):
    """Rows of more than a piece: to rank 1, not to the third one."""

    def act(group):
        x = rows_of(group.rank, 0, 3, SLOT_WORDS + 9)
        out = torch.full_like(x, torch.nan) if group.rank == 1 else None
        for _ in range(2):
            group.hand_over(root, x, out)
        return x, out

    results = on_every_rank(3, memory_fd, act)
    parts = [rows_of(rank, 0, 3, SLOT_WORDS + 9) for rank in range(3)]
    assert torch.equal(results[1][1], exchange.exchange(parts, exchange.FROM_ONE, root))
    for part, (x, _) in zip(parts, results, strict=True):
        assert torch.equal(x, part)


@pytest.mark.parametrize("size", [2, 3])
def test_gather_and_broadcast(memory_fd, size):
    width = SLOT_WORDS // 2 + 5

    def act(group):
        padded = torch.full((9, width + 11), torch.nan)
        padded[:, :width] = rows_of(group.rank, 0, 9, width)
        gathered = group.gather(np.array([7]), padded, width)
        for launch in gathered.operations:
            launch()
        tokens = np.arange(5, dtype=np.int32) * (group.rank - 2)
        group.broadcast(tokens)
        return gathered.rows, tokens.tolist()

    results = on_every_rank(size, memory_fd, act)
    rows = [rows_of(rank, 0, 9, width) for rank in range(size)]
    want = exchange.exchange(rows, exchange.SIDE_BY_SIDE)
    assert torch.equal(results[0][0][:7], want[:7])
    assert not results[0][0][7:].any()
    assert all(gathered is None for gathered, _ in results[1:])
    assert all(tokens == [0, -2, -4, -6, -8] for _, tokens in results)


def test_barriers(memory_fd):
    came = []

    def act(group):
        for turn in range(20):
            came.append((turn, group.rank))
            group.barrier()

    on_every_rank(3, memory_fd, act)
    assert [turn for turn, _ in came] == sorted(turn for turn, _ in came)


def test_ranks_share_a_file_with_those_of_their_host(memory_fd):
    """Two and two, whose hosts here are one."""

    def act(group):
        fd = group.share_file(group.rank // 2 * 2)
        os.pwrite(fd, b"%d" % group.rank, group.rank)
        group.barrier()
        found = os.pread(fd, 9, 0)
        os.close(fd)
        return found

    assert on_every_rank(4, memory_fd, act) == [b"01", b"01", b"\0\00023", b"\0\00023"]


def test_who_is_missing_is_named(memory_fd):
    def act(group):
        raise AssertionError("not all are here")

    with pytest.raises(TimeoutError, match=r"waited 0\.1 s for the others: missing are 2, 3"):
        on_every_rank(4, memory_fd, act, timeout=0.2, here=2)


def test_who_waits_for_one_that_has_left(memory_fd):
    def act(group):
        if group.rank == 1:
            group.leave()
            return None
        with pytest.raises(PeerDeadError, match="another rank has left"):
            group.broadcast(np.zeros(1, np.int32))
        (launch,) = group.sum(np.array([1]), torch.zeros(1, 3))
        launch()  # doesn't wait any more
        with pytest.raises(PeerDeadError):
            group.barrier()
        return True

    assert on_every_rank(2, memory_fd, act)[0]


def test_who_has_left_may_have_come_before(memory_fd):
    """Between the two looks of one who waits."""

    def act(group):
        looks = iter([[True, False], [True, True], [True, True]])
        group.leave()
        group._wait(1.0, lambda: np.array(next(looks)))
        return True

    assert on_every_rank(1, memory_fd, act) == [True]


def test_a_rank_that_does_not_come_to_a_step(memory_fd):
    def act(group):
        group.barrier()
        if group.rank == 0:
            group.broadcast(np.zeros(1, np.int32))

    with pytest.raises(
        TimeoutError, match=r"rank 0 of 2 has waited 0\.5 s for the others in a step"
    ):
        on_every_rank(2, memory_fd, act, timeout=0.5)
