"""Which requests of a dead client end, and with which word, whatever the order of the words."""

from __future__ import annotations

from ringcast.actors.scheduler.client_deaths import ClientDeaths

ZERO, ONE = "tokenizer.0", "tokenizer.1"


def test_a_tokenizer_that_has_spoken_owes_nothing():
    deaths = ClientDeaths([ZERO, ONE])
    deaths.lost(3)
    deaths.aborted(3, ZERO)
    assert deaths.lost_tokenizer(ZERO) == []
    assert deaths.lost_tokenizer(ONE) == [3]
    assert deaths.lost_tokenizer(ONE) == []


def test_its_word_may_come_first():
    deaths = ClientDeaths([ZERO, ONE])
    deaths.aborted(3, ONE)
    deaths.lost(3)
    assert deaths.lost_tokenizer(ONE) == []
    assert deaths.lost_tokenizer(ZERO) == [3]


def test_who_was_down_when_a_client_died_may_never_hear_of_it():
    deaths = ClientDeaths([ZERO, ONE])
    deaths.lost_tokenizer(ONE)
    deaths.lost(3)
    deaths.heard(ONE)  # of the next incarnation of the client, perhaps
    assert deaths.lost_tokenizer(ONE) == []


def test_who_was_down_and_hears_of_it_all_the_same_leaves_nothing_behind():
    deaths = ClientDeaths([ONE])
    deaths.lost_tokenizer(ONE)
    deaths.lost(3)
    deaths.aborted(3, ONE)
    deaths.lost(3)  # the next incarnation
    assert deaths.lost_tokenizer(ONE) == [3]
