"""How layers are split into stages, and what stages hand on, with threads for processes."""

from __future__ import annotations

import os
import threading

import numpy as np
import pytest
import torch

from ringcast.executor.input_batch import InputBatch
from ringcast.executor.parallel import map_memory
from ringcast.executor.pipeline import Link, join
from ringcast.executor.sampled_tokens import Tokens
from ringcast.executor.stages import deal_stage, split
from ringcast.kernels.cpu.pipe import pipe_bytes
from ringcast.mq import codec
from ringcast.mq.config import EngineConfig, build
from ringcast.mq.errors import ConfigError, PeerDeadError
from ringcast.mq.kv_groups import deal
from ringcast.mq.messages import NewSequence, StepPlan
from ringcast.mq.sampling_params import SamplingParams


@pytest.mark.parametrize(
    ("layers", "stages", "sizes"),
    [(7, 1, [7]), (6, 3, [2, 2, 2]), (7, 2, [4, 3]), (11, 4, [3, 3, 3, 2]), (3, 3, [1, 1, 1])],
)
def test_layers_are_split_evenly(layers, stages, sizes):
    ranges = split(layers, stages)
    assert [len(part) for part in ranges] == sizes
    assert [layer for part in ranges for layer in part] == list(range(layers))


def test_more_stages_than_layers():
    with pytest.raises(ConfigError, match=r"pipeline_parallel_size = 4: .* 3 layers.* at most 3"):
        split(3, 4)


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
@pytest.mark.parametrize(
    "windows", [[0] * 9, [5] * 9, [8, 8, 8, 8, 8, 0] * 4 + [8, 8], [0, 7, 7, 7]]
)
def test_groups_of_layers_agree(windows, stages):
    whole = deal(windows)
    found = []
    for layers in split(len(windows), stages):
        groups = deal_stage(windows, layers)
        assert [group.spec for group in groups] == [group.spec for group in whole]
        assert sorted(layer for group in groups for layer in group.layers) == list(layers)
        # A block has room for one group's layers: not many more than an even share.
        most = max(len(group.layers) for group in groups)
        assert most <= -(-len(layers) // len(groups)) + len({*windows})
        found += [(i, layer) for i, group in enumerate(groups) for layer in group.layers]
    assert all(windows[layer] == getattr(whole[i].spec, "window", 0) for i, layer in found)


class Pipe:
    """Memory of a pipe, and its ends."""

    def __init__(self, readers=1, slots=2, words=12, timeout=30.0):
        fd = os.memfd_create("pipe")
        try:
            self._memory = map_memory(fd, pipe_bytes(readers, slots, words))
        finally:
            os.close(fd)
        self._shape, self._timeout = (readers, slots, words), timeout
        self.has_left = np.zeros(1, np.int64)

    def end(self, reader=None):
        return Link(self._memory, self._shape, reader, self.has_left, self._timeout)


def test_items_come_whole_and_in_order():
    """Of a few rows each, faster than they are read; each to both readers."""
    pipe, items = Pipe(readers=2), 200
    got = [[], []]

    def send():
        rows, x = np.zeros(1, np.int64), torch.zeros(4, 3)
        link = pipe.end()
        launch = link.bind(rows, x)
        for item in range(items):
            rows[0] = item % 5
            x[:] = item
            link.wait()
            launch()

    def receive(reader):
        rows, x = np.zeros(1, np.int64), torch.full((4, 3), -1.0)
        link = pipe.end(reader)
        launch = link.bind(rows, x)
        for item in range(items):
            rows[0] = item % 5
            x.fill_(-1.0)
            link.wait()
            launch()
            got[reader].append((x[: item % 5].tolist(), x[item % 5 :].tolist()))

    threads = [threading.Thread(target=receive, args=(reader,)) for reader in (0, 1)]
    threads.append(threading.Thread(target=send))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for item in range(items):
        count = item % 5
        whole = [[float(item)] * 3] * count, [[-1.0] * 3] * (4 - count)
        assert got[0][item] == got[1][item] == whole


def test_there_is_room_until_the_slowest_reader_is_behind():
    pipe = Pipe(readers=2)
    writer, readers = pipe.end(), [pipe.end(0), pipe.end(1)]
    rows, x = np.ones(1, np.int64), torch.zeros(4, 3)
    send, (one, other) = writer.bind(rows, x), (reader.bind(rows, x) for reader in readers)
    for _ in range(2):
        assert writer.is_ready
        send()
    assert not writer.is_ready
    one()
    assert not writer.is_ready
    other()
    assert writer.is_ready
    assert [reader.is_ready for reader in readers] == [True, True]


def test_who_waits_for_a_stage_that_has_left():
    pipe = Pipe()
    pipe.has_left[0] = 1
    with pytest.raises(PeerDeadError, match="another stage"):
        pipe.end(0).wait()


def test_who_has_left_may_have_sent_something_before():
    """Between the two looks of one who waits."""
    pipe = Pipe()
    send = pipe.end().bind(np.ones(1, np.int64), torch.zeros(4, 3))
    reader = pipe.end(0)

    class Left:
        def __getitem__(self, word):
            if not reader.is_ready:
                send()
            return 1

    reader._has_left = Left()
    reader.wait()


def test_who_waits_too_long():
    with pytest.raises(TimeoutError, match=r"waited 0\.1 s for its input"):
        Pipe(timeout=0.1).end(0).wait()


# Tokens


def make_batch(*rows):
    """Each with one token known, and computed."""
    batch = InputBatch(4, 16, 20, 4)
    enter(batch, *rows)
    return batch


def enter(batch, *rows, removed=()):
    ones = codec.pack([1])
    new = [NewSequence(row, f"{row}", 0, ones, 1, 0, ones, SamplingParams()) for row in rows]
    batch.apply(StepPlan(0, codec.pack(removed), new, b"", b"", b"", b"", b"", b""))


def known(batch, row):
    return batch.known_tokens[row, : batch.num_known[row]].tolist()


class Feed:
    """The output rank and a stage before it."""

    def __init__(self, *rows, slots=3):
        pipe = Pipe(slots=slots, words=4)
        self.first, self.last = make_batch(*rows), make_batch(*rows)
        self.hears = Tokens(self.first, pipe.end(0), is_last=False)
        self.tells = Tokens(self.last, pipe.end(), is_last=True)

    def sampled(self, *rows):
        """The first stage has run a step that samples these rows."""
        self.hears.after(np.array(rows, np.int32), np.zeros(0, np.int32))

    def tell(self, tokens):
        rows = np.array([*tokens], np.int32)
        self.tells.after(rows, np.array([*tokens.values()], np.int32))


def test_tokens_reach_the_stages_before():
    feed = Feed(0, 1, 2)
    feed.sampled(0, 2)
    feed.sampled(1)
    feed.hears.before(b"", b"")  # nothing is there, and nothing needed
    feed.tell({0: 50, 2: 52})
    feed.hears.before(b"", codec.pack([0]))
    assert [known(feed.first, row) for row in range(3)] == [[1, 50], [1], [1, 52]]
    feed.tell({1: 51})
    feed.hears.before(b"", b"")  # it takes all that is there
    assert known(feed.first, 1) == known(feed.last, 1) == [1, 51]


def test_who_needs_a_token_waits_for_it():
    feed = Feed(0)
    feed.sampled(0)
    waits = threading.Event()

    def tell():
        waits.wait()
        feed.tell({0: 50})

    thread = threading.Thread(target=tell)
    thread.start()
    waits.set()
    feed.hears.before(b"", codec.pack([0]))
    thread.join()
    assert known(feed.first, 0) == [1, 50]


def test_a_token_of_a_row_that_has_left_is_dropped():
    """Though another sequence has the row by then, and awaits a token, too."""
    feed = Feed(0, 1)
    feed.sampled(0, 1)
    gone = codec.pack([0])
    feed.hears.before(gone, b"")
    enter(feed.first, 0, removed=[0])
    feed.sampled(0)
    feed.tell({0: 50, 1: 51})
    feed.hears.before(b"", codec.pack([1]))
    assert [known(feed.first, row) for row in (0, 1)] == [[1], [1, 51]]
    feed.tell({0: 60})
    feed.hears.before(b"", codec.pack([0]))
    assert known(feed.first, 0) == [1, 60]


def test_workers_find_their_places():
    """Two stages of two ranks, as threads: what each hears of the others."""
    config = build(
        EngineConfig,
        {
            "device": "cpu",
            "tensor_parallel_size": 2,
            "pipeline_parallel_size": 2,
            "startup_timeout": 30.0,
        },
    )
    assert (config.num_workers, config.output_rank) == (4, 2)
    fd = os.memfd_create("ranks")
    results, failed = {}, []

    def run(rank):
        torch.set_num_threads(1)
        try:
            place = join(config, rank, fd, 8)
            stage, rows, x = place.stage, np.ones(1, np.int64), torch.full((3, 8), float(rank))
            for launch in place.group.sum(rows, x):
                launch()
            if not stage.is_first:
                stage.wait()
                stage.receive(rows, x)()
            if not stage.is_last:
                stage.wait()
                stage.send(rows, x)()
            where = stage.position.number, place.group.rank
            results[rank] = *where, x[0, 0].item(), place.tokens is None
            place.world.barrier()
            place.leave()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    os.close(fd)
    assert not failed
    assert results == {
        0: (0, 0, 1.0, False),
        1: (0, 1, 1.0, False),
        2: (1, 0, 1.0, False),
        3: (1, 1, 1.0, True),
    }


def test_more_workers_than_an_engine_has():
    with pytest.raises(ConfigError, match=r"pipeline_parallel_size = 9: .* 72 workers.*most 64"):
        build(EngineConfig, {"pipeline_parallel_size": 9, "tensor_parallel_size": 8})
