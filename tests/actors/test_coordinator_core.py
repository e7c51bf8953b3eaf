"""The coordinator: what it hears of each replica, every client hears, and not too often."""

from ringcast.actors.coordinator_core import CoordinatorCore
from ringcast.actors.core import PeerAdded, PeerLost
from ringcast.mq import codec
from ringcast.mq.messages import AskWave, Load, StartWave, WantWave


def counts(send):
    message = send.message
    fields = (message.waiting, message.running, message.ours)
    return [codec.ints(field).tolist() for field in fields]


def test_each_client_hears_of_all_and_of_its_own():
    core = CoordinatorCore(3, 2)
    assert core.due is None
    core.handle("scheduler.0", Load(1, 5, 0.5, [(0, 2), (1, 4)]), 1.0)
    core.handle("scheduler.2", Load(0, 1, 0.25, [(1, 1)]), 1.0)
    first, second = core.flush(1.0)
    assert (first.to, second.to) == ("client.0", "client.1")
    assert counts(first) == [[1, -1, 0], [5, -1, 1], [2, 0, 0]]
    assert counts(second) == [[1, -1, 0], [5, -1, 1], [4, 0, 1]]
    assert codec.floats(first.message.kv_usage).tolist() == [0.5, -1.0, 0.25]
    assert first.message.num_clients == 2


def test_what_changes_soon_after_is_told_when_it_is_due():
    core = CoordinatorCore(1, 1, interval=0.1)
    core.handle("scheduler.0", Load(0, 1, 0.0, []), 1.0)
    assert core.due <= 1.0
    assert len(core.flush(1.0)) == 1
    assert core.due is None
    core.handle("scheduler.0", Load(0, 2, 0.0, []), 1.03)
    assert list(core.flush(1.03)) == []
    assert core.due == 1.1
    assert counts(core.flush(1.1)[0])[1] == [2]
    assert list(core.flush(2.0)) == []
    assert core.statistics() == {"reports": 2, "published": 2}


def test_of_a_dead_replica_nothing_is_known():
    core = CoordinatorCore(2, 1)
    core.handle("scheduler.1", Load(3, 4, 0.5, [(0, 7)]), 1.0)
    core.flush(1.0)
    core.handle("scheduler.1", PeerLost(), 2.0)
    assert counts(core.flush(2.0)[0]) == [[-1, -1], [-1, -1], [0, 0]]


def test_a_new_client_has_nothing_anywhere():
    core = CoordinatorCore(1, 2)
    core.handle("scheduler.0", Load(0, 4, 0.5, [(0, 3), (1, 1)]), 1.0)
    core.handle("client.0", PeerLost(), 1.0)
    core.handle("tokenizer.0", PeerLost(), 1.0)
    first, second = core.flush(1.0)
    assert counts(first)[2] == [0]
    assert counts(second)[2] == [1]


def test_a_wave_is_started_once_for_all_that_want_it():
    core = CoordinatorCore(3, lockstep=True)
    asked = core.flush(1.0)
    assert [send.to for send in asked] == ["scheduler.0", "scheduler.1", "scheduler.2"]
    assert {send.message for send in asked} == {AskWave()}
    assert core.due is None
    started = core.handle("scheduler.1", WantWave(4), 1.0)
    assert [(send.to, send.message) for send in started] == [
        (f"scheduler.{engine}", StartWave(4)) for engine in range(3)
    ]
    assert not core.handle("scheduler.2", WantWave(4), 1.0)
    assert core.handle("scheduler.2", WantWave(5), 1.1)


def test_after_a_death_waves_begin_anew():
    core = CoordinatorCore(2, lockstep=True)
    core.flush(1.0)
    core.handle("scheduler.1", WantWave(1), 1.0)
    for engine in range(2):
        core.handle(f"scheduler.{engine}", PeerLost(), 2.0)
    assert AskWave() in [send.message for send in core.flush(2.0)]
    assert len(core.handle("scheduler.0", WantWave(1), 3.0)) == 2


def test_replicas_that_do_not_step_together_are_asked_nothing():
    core = CoordinatorCore(2)
    assert core.due is None
    core.handle("scheduler.0", PeerLost(), 1.0)
    assert [send.to for send in core.flush(1.0)] == ["client.0"]


def test_a_new_replica_is_unknown_until_it_says_something():
    core = CoordinatorCore(1, 2)
    core.handle("scheduler.0", Load(1, 0, 0.5, [(1, 1)]), 1.0)
    core.handle("scheduler.2", PeerAdded(), 1.0)
    core.handle("client.0", PeerAdded(), 1.0)
    first, second = core.flush(1.0)
    assert counts(first) == [[1, -1, -1], [0, -1, -1], [0, 0, 0]]
    assert counts(second) == [[1, -1, -1], [0, -1, -1], [1, 0, 0]]
    core.handle("scheduler.2", Load(0, 2, 0.25, [(0, 2)]), 2.0)
    assert counts(core.flush(2.0)[0]) == [[1, -1, 0], [0, -1, 2], [0, 0, 2]]
