"""Copies of the ranks' memory on several hosts, in one process: a memory for each host."""

from __future__ import annotations

import itertools
import os
import random
import threading
import time
from collections import deque

import numpy as np
import pytest
import torch

from ringcast.executor import mirror
from ringcast.executor.mirror import Exchange, Mirror, Pipe, lay_out, num_bytes, regions
from ringcast.executor.parallel import HostGroup, map_memory, map_parts
from ringcast.executor.pipeline import join
from ringcast.kernels.cpu import exchange
from ringcast.kernels.cpu.memory import LINE, SLOT_WORDS
from ringcast.mq.config import EngineConfig, build
from ringcast.mq.errors import CorruptRecordError, PeerDeadError

PARTS = [Exchange((0, 1, 2, 3)), Exchange((2, 3)), Pipe(1, (0, 3), 3, 20), Pipe(0, (2,), 2, 9)]


def make_memory(parts):
    placed, size = lay_out(parts)
    memory = np.zeros(size // 8, np.int64)
    mirror.describe(memory, placed)
    return memory


def description_of(parts):
    placed, _ = lay_out(parts)
    memory = make_memory(parts)
    size = int(memory[0])
    assert placed
    return memory.view(np.uint8)[mirror._TEXT : mirror._TEXT + size].tobytes()


class Star:
    """Hosts with a copy each; hosts[h] are the ranks of host h, and host 0 is in the middle.

    Records travel when `deliver` is called, of each link and direction in order.
    """

    def __init__(self, parts, hosts, memories=None, description=None):
        description = description or description_of(parts)
        self.memories = memories or [make_memory(parts) for _ in hosts]
        everyone = {rank for ranks in hosts for rank in ranks}
        self.mirrors, self.ways = {}, {}
        for node in range(1, len(hosts)):
            middle, outer = self.memories[0], self.memories[node]
            ranks = set(hosts[node])
            self.mirrors[0, node] = Mirror(middle, description, ranks, node - 1)
            self.mirrors[node, 0] = Mirror(outer, description, everyone - ranks, 0)
        for way, one in self.mirrors.items():
            self.ways[way] = deque([one.greeting()])

    def look(self, way):
        if self.mirrors[way].is_open and (payload := self.mirrors[way].changes()):
            self.ways[way].append(payload)

    def deliver(self, way):
        if self.ways[way]:
            self.mirrors[way[::-1]].take(self.ways[way].popleft())

    def settle(self):
        """Until everything has come."""
        while any(self.ways.values()) or not all(m.is_open for m in self.mirrors.values()):
            for way in self.ways:
                self.deliver(way)
                self.look(way)

    def pump(self, ended):
        while not ended.is_set():
            for way in self.ways:
                self.look(way)
                self.deliver(way)
            time.sleep(0)


# What is where


def test_regions_do_not_overlap():
    placed, size = lay_out(PARTS)
    taken = []
    for region in regions(placed):
        taken.append((region.word, region.word + 8))
        for piece in range(1, region.num_slots + 1):
            slot = region.slot(piece)
            taken.append((slot, slot + LINE + region.most_bytes))
    taken.sort()
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(taken))
    assert taken[0][0] == mirror.HEAD_BYTES
    assert taken[-1][1] <= size


def test_the_head_says_what_is_where():
    fd = os.memfd_create("ranks")
    assert mirror.read_description(fd) is None
    parts = map_parts(fd, PARTS, 0)
    assert [8 * len(part) for part in parts] == [num_bytes(part) for part in PARTS]
    assert mirror.read_description(fd) == description_of(PARTS)
    os.close(fd)


def test_only_what_has_ranks_on_both_sides_travels():
    star = Star(PARTS, [(0, 1), (2, 3)])
    star.settle()
    parts, _ = lay_out(PARTS)
    within = regions([parts[1]])
    for region in within:
        star.memories[1][region.word // 8] = 1
    star.settle()
    assert not any(star.memories[0][region.word // 8] for region in within)


def test_who_is_no_member_of_a_part_passes_it_on():
    """Ranks 1 and 2 are on two outer hosts."""
    star = Star([Pipe(1, (2,), 2, 4)], [(0,), (1,), (2,)])
    star.settle()
    (region, *_) = regions(lay_out([Pipe(1, (2,), 2, 4)])[0])
    _write(star.memories[1], region, 1, 16, 7)
    for way in [(1, 0), (0, 2)]:
        star.look(way)
        star.deliver(way)
    assert _read(star.memories[2], region, 1) == [7, 7]


# Pieces: models of ranks, whose every step is drawn


def _write(memory, region, piece, used, value):
    slot = region.slot(piece)
    memory[(slot + LINE) // 8 : (slot + LINE + used) // 8] = value
    memory[slot // 8] = used
    memory[region.word // 8] = piece


def _read(memory, region, piece):
    slot = region.slot(piece)
    used = memory[slot // 8]
    return memory[(slot + LINE) // 8 : (slot + LINE + used) // 8].tolist()


def exchange_rank(memory, counts, rank, pieces, say):
    """As kernels/cpu/exchange.py has it; a yield is where others may come between."""
    for piece in range(1, pieces + 1):
        words = 1 + (7 * piece + rank) % 5
        slot = counts[rank].slot(piece)
        memory[slot // 8] = 0
        yield
        memory[slot // 8] = 8 * words
        memory[(slot + LINE) // 8 : (slot + LINE) // 8 + words] = 100 * piece + rank
        yield
        memory[counts[rank].word // 8] = piece
        for other, region in counts.items():
            while memory[region.word // 8] < piece:
                yield "waits"
            assert _read(memory, region, piece) == [100 * piece + other] * (
                1 + (7 * piece + other) % 5
            ), (rank, other, piece)
            say(rank, piece)
            yield


def pipe_writer(memory, sent, taken, items, say):
    for item in range(1, items + 1):
        while min(memory[t.word // 8] for t in taken) + sent.num_slots < item:
            yield "waits"
        slot = sent.slot(item)
        memory[slot // 8] = 8
        yield
        memory[(slot + LINE) // 8] = item
        yield
        memory[sent.word // 8] = item


def pipe_reader(memory, sent, own, items, say):
    for item in range(1, items + 1):
        while memory[sent.word // 8] < item:
            yield "waits"
        assert _read(memory, sent, item) == [item]
        say("reader", item)
        yield
        memory[own.word // 8] = item


def actors_of(star, hosts, parts, pieces, say):
    """A generator for each rank of the first part, and for each end of the second."""
    host_of = {rank: star.memories[h] for h, ranks in enumerate(hosts) for rank in ranks}
    (whole, pipe), _ = lay_out(parts)
    lane = [region for region in regions([whole]) if region.num_slots][: len(whole.ranks)]
    counts = dict(zip(whole.ranks, lane, strict=True))
    sent, *taken = regions([pipe])
    yield from (exchange_rank(host_of[r], counts, r, pieces, say) for r in whole.ranks)
    yield pipe_writer(host_of[pipe.writer], sent, taken, pieces, say)
    for reader, own in zip(pipe.readers, taken, strict=True):
        yield pipe_reader(host_of[reader], sent, own, pieces, say)


LAYOUTS = [
    [(0, 1), (2,)],
    [(0,), (1, 2, 3)],
    [(0,), (1, 2), (3,)],
]


@pytest.mark.parametrize("hosts", LAYOUTS)
def test_whatever_is_late_pieces_come_whole_and_in_order(hosts):
    pieces, everyone = 12, tuple(rank for ranks in hosts for rank in ranks)
    for seed in range(15):
        drawn = random.Random(seed)
        parts = [Exchange(everyone), Pipe(1, everyone[2:], drawn.choice((1, 2, 3)), 4)]
        star = Star(parts, hosts)
        star.settle()
        said = []
        running = list(
            actors_of(star, hosts, parts, pieces, lambda *what, said=said: said.append(what))
        )
        slow = {way: drawn.random() for way in star.ways}
        while running:
            for way in star.ways:
                if drawn.random() < slow[way]:
                    star.look(way)
                if drawn.random() < slow[way]:
                    star.deliver(way)
            actor = drawn.choice(running)
            if next(actor, "done") == "done":
                running.remove(actor)
        assert len(said) == pieces * (len(everyone) ** 2 + len(everyone[2:]))


# Real ranks


def on_hosts(hosts, act, timeout=30.0):
    """What act(group) returns on each rank, where each host has a memory of its own."""
    everyone = tuple(rank for ranks in hosts for rank in ranks)
    fds = [os.memfd_create("ranks") for _ in hosts]
    results, failed = {}, []

    def run(rank, host):
        torch.set_num_threads(2)
        num_links = len(hosts) - 1 if host == 0 else 1
        try:
            results[rank] = act(rank, fds[host], num_links)
        except BaseException as error:
            failed.append(error)

    threads = [
        threading.Thread(target=run, args=(rank, host))
        for host, ranks in enumerate(hosts)
        for rank in ranks
    ]
    for thread in threads:
        thread.start()
    while None in (descriptions := [mirror.read_description(fd) for fd in fds]):
        time.sleep(0.001)
    assert len({*descriptions}) == 1
    memories = [map_memory(fd, os.fstat(fd).st_size) for fd in fds]
    star, ended = Star(None, hosts, memories, descriptions[0]), threading.Event()
    pump = threading.Thread(target=star.pump, args=(ended,))
    pump.start()
    for thread in threads:
        thread.join()
    ended.set()
    pump.join()
    for fd in fds:
        os.close(fd)
    if failed:
        raise failed[0]
    return [results[rank] for rank in everyone]


def rows_of(rank, call, rows, width):
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(1000 * call + rank))


SHAPES = [(1, 1), (3, 40), (1, SLOT_WORDS + 3), (300, 64), (0, 8), (700, 100), (2, 9)]


@pytest.mark.parametrize("hosts", [[(0,), (1,)], [(0,), (1,), (2,)]])
def test_ranks_on_several_hosts_have_the_same_sums(hosts):
    size = sum(map(len, hosts))

    def act(rank, fd, num_links):
        (memory,) = map_parts(fd, [Exchange(tuple(range(size)))], num_links)
        group = HostGroup(rank, size, memory, 30.0)
        group.barrier()
        sums = []
        for call, (rows, width) in enumerate(SHAPES * 2):
            x = rows_of(rank, call, rows, width)
            (launch,) = group.sum(np.array([rows]), x)
            launch()
            tokens = np.arange(5, dtype=np.int32) * (rank - 2)
            group.broadcast(tokens)
            assert tokens.tolist() == [0, -2, -4, -6, -8]
            sums.append(x)
        return sums

    results = on_hosts(hosts, act)
    for call, (rows, width) in enumerate(SHAPES * 2):
        want = exchange.exchange(
            [rows_of(rank, call, rows, width) for rank in range(size)], exchange.SUM
        )
        torch.testing.assert_close(results[0][call], want)
        for result in results:
            assert torch.equal(result[call], results[0][call])


def test_stages_on_several_hosts():
    config = build(
        EngineConfig, {"device": "cpu", "pipeline_parallel_size": 2, "tensor_parallel_size": 2}
    )

    def act(rank, fd, num_links):
        place = join(config, rank, fd, 8, num_links)
        stage, rows, x = place.stage, np.ones(1, np.int64), torch.full((3, 8), float(rank))
        got = []
        bound = [*place.group.sum(rows, x)]
        if not stage.is_first:
            bound.insert(0, stage.receive(rows, x))
        if not stage.is_last:
            bound.append(stage.send(rows, x))
        for _ in range(20):
            stage.wait()
            for launch in bound:
                launch()
            got.append(x[0, 0].item())
            x[:] = got[-1] + 1
        place.world.barrier()
        return got

    results = on_hosts([(0, 1), (2, 3)], act)
    assert results[0] == results[1]
    assert results[2] == results[3] == [2 * value for value in results[0]]


def test_who_leaves_is_missed_on_every_host():
    def act(rank, fd, num_links):
        (memory,) = map_parts(fd, [Exchange((0, 1, 2))], num_links)
        group = HostGroup(rank, 3, memory, 30.0)
        if rank == 1:
            group.leave()
            return
        with pytest.raises(PeerDeadError, match="another rank has left"):
            group.barrier()

    on_hosts([(0,), (1,), (2,)], act)


# What nobody says


def test_what_the_other_end_cannot_have_said():
    parts = [Exchange((0, 1))]
    (placed,), _ = lay_out(parts)
    lane = next(i for i, region in enumerate(regions([placed])) if region.num_slots)
    one = Mirror(make_memory(parts), description_of(parts), {1}, 0)
    with pytest.raises(CorruptRecordError, match="another layout"):
        one.take(Mirror(make_memory(PARTS), description_of(PARTS), {1}, 0).greeting())
    one.take(one.greeting())
    piece = mirror._PIECE
    for payload, reason in [
        (b"torn", "torn"),
        (piece.pack(lane, 0, 1), "isn't theirs"),
        (piece.pack(len(regions([placed])), 0, 1), "isn't theirs"),
        (piece.pack(lane + 1, 0, 2), "piece 2 of 0 bytes came after piece 0"),
        (piece.pack(lane + 1, 8, 1) + b"short", "piece 1 of 8 bytes"),
        (piece.pack(lane + 1, 4 * SLOT_WORDS + 8, 1) + bytes(4 * SLOT_WORDS + 8), "32776 bytes"),
        (piece.pack(3, 8, 1) + bytes(8), "a word .* came with a piece"),
    ]:
        with pytest.raises(CorruptRecordError, match=reason):
            one.take(payload)
