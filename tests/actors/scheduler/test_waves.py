"""When replicas that step together step: all send equally many plans, whatever each has to do."""

from __future__ import annotations

import pytest

from ringcast.actors.scheduler.waves import Waves
from ringcast.mq.messages import AskWave, StartWave, WantWave, WaveStep


def start(most_ahead):
    waves = Waves(most_ahead)
    waves.start(StartWave(1))
    return waves


def send_all(waves, has_work=False):
    sent = []
    while waves.may_send:
        sent.append(waves.send(has_work, is_dummy=not has_work).step)
    return sent


@pytest.mark.parametrize("most_ahead", [1, 2, 3])
def test_after_the_first_step_without_work_nothing_more_is_sent(most_ahead):
    waves = start(most_ahead)
    assert send_all(waves) == list(range(1, most_ahead + 1))
    for step in range(1, 5):
        waves.hear(any_work=True)
        assert send_all(waves) == [step + most_ahead]
    for left in range(most_ahead, 0, -1):
        assert not waves.paused
        waves.hear(any_work=left < most_ahead)  # work that came too late doesn't count
        assert send_all(waves) == []
        waves.check()
    assert waves.paused
    assert waves.statistics() == {"waves": 1, "dummy_steps": 4 + most_ahead}


def test_a_wave_is_asked_for_once():
    waves = Waves(2)
    assert waves.words(has_work=False) == []
    assert waves.words(has_work=True) == [WantWave(1)]
    assert waves.words(has_work=True) == []
    waves.start(StartWave(1))
    assert waves.words(has_work=True) == []
    assert waves.send(True, is_dummy=False) == WaveStep(1, 1, True)


def test_the_next_wave_follows_this_one():
    waves = start(1)
    send_all(waves)
    waves.start(StartWave(2))
    assert waves.wave == 1
    assert not waves.may_send
    waves.hear(any_work=False)
    assert waves.wave == 2
    assert send_all(waves) == [1]


def test_a_word_of_another_life_is_nothing():
    waves = Waves(1)
    waves.start(StartWave(57))
    assert waves.paused
    waves.start(StartWave(1))
    waves.start(StartWave(1))
    assert send_all(waves) == [1]
    waves.hear(any_work=False)
    assert waves.paused
    waves.check()


def test_a_new_coordinator_is_told_what_others_may_not_know():
    waves = Waves(1)
    waves.ask(AskWave())
    assert waves.words(has_work=False) == []
    assert waves.words(has_work=True) == [WantWave(1)]
    waves.ask(AskWave())
    assert waves.words(has_work=True) == [WantWave(1)]
    waves.start(StartWave(1))
    waves.ask(AskWave())
    assert waves.words(has_work=False) == [WantWave(1)]
    waves.start(StartWave(2))
    waves.ask(AskWave())
    assert waves.words(has_work=False) == [WantWave(2)]
