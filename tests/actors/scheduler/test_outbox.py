"""Log-probabilities on their way from a worker's step to the detokenizer's message."""

import numpy as np

from ringcast.actors.scheduler.outbox import Outbox
from ringcast.mq import codec, messages


def logprobs(index, width, base=0):
    ids = np.arange(len(index) * width, dtype=np.int32) + base
    return messages.TokenLogprobs(
        width=width,
        index=codec.pack(index),
        token_ids=ids.tobytes(),
        logprobs=(-ids).astype(np.float32).tobytes(),
        rank=codec.pack([base + i for i in range(len(index))]),
    )


def drained(outbox):
    ((step,),) = outbox.drain()
    found = step.logprobs
    shape = (-1, found.width)
    return (
        codec.ints(found.index).tolist(),
        codec.ints(found.token_ids).reshape(shape).tolist(),
        codec.floats(found.logprobs).reshape(shape).tolist(),
        codec.ints(found.rank).tolist(),
    )


def test_dropped_rows_take_theirs_along():
    outbox = Outbox()
    outbox.streams += [1, 2]
    # of rows 5, 6, 7, 8 only 7 was dropped; 6, 7 and 8 had asked
    outbox.add_logprobs(logprobs([1, 2, 3], 2), [5, 6, 7, 8], {7}, first=10)
    index, ids, values, rank = drained(outbox)
    assert index == [11, 12]
    assert ids == [[0, 1], [4, 5]]
    assert values == [[0, -1], [-4, -5]]
    assert rank == [0, 2]


def test_nothing_is_left_if_all_that_asked_were_dropped():
    outbox = Outbox()
    outbox.streams.append(1)
    outbox.add_logprobs(logprobs([1], 2), [5, 6], {6}, first=0)
    ((step,),) = outbox.drain()
    assert step.logprobs is None


def test_several_steps_are_joined_at_the_widest():
    outbox = Outbox()
    outbox.streams += [1, 2]
    outbox.add_logprobs(logprobs([0], 1), [5], set(), first=0)
    outbox.add_logprobs(logprobs([0], 3, base=100), [5], set(), first=1)
    index, ids, values, rank = drained(outbox)
    assert index == [0, 1]
    assert ids == [[0, -1, -1], [100, 101, 102]]
    assert values == [[0, -np.inf, -np.inf], [-100, -101, -102]]
    assert rank == [0, 100]


def test_only_those_that_asked_have_any(make_engine):
    engine = make_engine()
    engine.add("a", range(5), max_tokens=3)
    engine.add("b", range(20, 25), max_tokens=3, logprobs=2)
    engine.add("c", range(40, 45), max_tokens=3, logprobs=0)
    engine.run()
    engine.assert_idle()
    steps = [step for step in engine.stream_steps if step.token_ids]
    assert len(steps) == 3
    for step in steps:
        streams, tokens = codec.longs(step.streams), codec.ints(step.token_ids)
        index = codec.ints(step.logprobs.index)
        ids = codec.ints(step.logprobs.token_ids).reshape(-1, 3)
        assert streams[index].tolist() == [engine.stream("b"), engine.stream("c")]
        assert ids[:, 0].tolist() == tokens[index].tolist()
        assert (ids[1, 1:] == -1).all()


def test_an_abort_in_flight_drops_its_own_only(make_engine):
    engine = make_engine()
    for name in "abc":
        engine.add(name, [ord(name)], logprobs=1)
    engine.flush()
    engine.abort("b")
    engine.answer()
    engine.flush()
    step = engine.stream_steps[-1]
    streams = codec.longs(step.streams)
    assert streams.tolist() == [engine.stream("a"), engine.stream("c")]
    index = codec.ints(step.logprobs.index)
    assert index.tolist() == [0, 1]
    ids = codec.ints(step.logprobs.token_ids).reshape(-1, 2)
    assert ids[:, 0].tolist() == codec.ints(step.token_ids).tolist()
    engine.run()
    engine.assert_idle()


def test_each_detokenizer_gets_its_own_streams_and_all_that_is_of_them():
    outbox = Outbox(2)
    outbox.streams += [4, 1, 2, 3]
    outbox.token_index += [0, 7, 0, 1]
    outbox.token_ids += [40, 10, 20, 30]
    outbox.add_logprobs(logprobs([0, 1, 3], 2), [5, 6, 7, 8], set(), first=0)
    outbox.ends += [messages.StreamEnd(stream, "length", 1) for stream in (3, 4)]
    outbox.cached += [(4, 16), (3, 8)]
    outbox.pooled.append((1, b"v"))
    outbox.pings.append(messages.Ping(0, 1, detokenizer=1))
    outbox.gone_heard.append(messages.PeersGoneHeard(5))
    (even, *last), (odd, ping, heard) = outbox.drain()
    assert codec.longs(even.streams).tolist() == [4, 2]
    assert codec.longs(odd.streams).tolist() == [1, 3]
    assert codec.ints(odd.token_index).tolist() == [7, 1]
    assert codec.ints(odd.token_ids).tolist() == [10, 30]
    assert codec.ints(even.logprobs.index).tolist() == [0]
    assert codec.ints(odd.logprobs.index).tolist() == [0, 1]
    assert codec.ints(odd.logprobs.token_ids).tolist() == [2, 3, 4, 5]
    assert [end.stream for end in (*even.ends, *odd.ends)] == [4, 3]
    assert (even.cached, odd.cached, even.pooled, odd.pooled) == (
        [(4, 16)],
        [(3, 8)],
        [],
        [(1, b"v")],
    )
    assert ping.number == 1
    assert last == [heard] == [messages.PeersGoneHeard(5)]
    assert outbox.drain() == [[], []]
