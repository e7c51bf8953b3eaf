"""The order of sequences, against a list that is sorted anew each time."""

import random
from types import SimpleNamespace

from ringcast.actors.scheduler.order import Ordered, WaitingQueue

THRESHOLD = 10


def make(rng, stream):
    tokens = [0] * rng.choice([3, THRESHOLD, THRESHOLD + 1, 30])
    return SimpleNamespace(stream=stream, place=(rng.randrange(-2, 3), stream), tokens=tokens)


def first(sequences, long_too):
    wanted = [s for s in sequences if long_too or len(s.tokens) <= THRESHOLD]
    return min(wanted, key=lambda s: s.place, default=None)


def test_the_waiting_queue_is_a_sorted_list():
    rng = random.Random(1)
    queue, model, taken = WaitingQueue(THRESHOLD), [], []
    for stream in range(5000):
        action = rng.random()
        if model and rng.random() < 0.2:
            rng.choice(model).tokens.append(0)  # it was in flight
        if action < 0.45:
            model.append(make(rng, stream))
            queue.add(model[-1])
        elif action < 0.6 and model:
            sequence = model.pop(rng.randrange(len(model)))
            queue.discard(sequence)
            queue.discard(sequence)
        elif action < 0.7 and taken:
            model.append(taken.pop())
            queue.add(model[-1])
        elif (sequence := queue.first(long_too := rng.random() < 0.7)) is not None:
            assert sequence is first(model, long_too)
            model.remove(sequence)
            queue.take(sequence)
            taken.append(sequence)
        assert queue.first() is first(model, True)
        assert queue.first(long_too=False) is first(model, False)
        assert len(queue) == len(model)
        assert {s.stream for s in queue} == {s.stream for s in model}


def test_what_is_discarded_does_not_pile_up():
    """Behind one that stays at the front, where nothing brings it to light."""
    rng = random.Random(2)
    queue = WaitingQueue(THRESHOLD)
    for stream, length in [(-1, 1), (-2, THRESHOLD + 1)]:
        queue.add(SimpleNamespace(stream=stream, place=(-5, stream), tokens=[0] * length))
    for stream in range(2000):
        sequence = make(rng, stream)
        queue.add(sequence)
        queue.discard(sequence)
    assert len(queue._short) + len(queue._long) < 60


def test_ordered_is_a_sorted_list():
    rng = random.Random(3)
    ordered, model = Ordered(), []
    for stream in range(2000):
        if rng.random() < 0.55 or not model:
            model.append(make(rng, stream))
            ordered.add(model[-1])
        else:
            gone = model.pop(rng.randrange(len(model)))
            assert gone in ordered
            ordered.remove(gone)
            assert gone not in ordered
        model.sort(key=lambda s: s.place)
        assert list(ordered) == model
        assert len(ordered) == len(model)
        if model:
            assert ordered.last is model[-1]
