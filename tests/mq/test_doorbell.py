"""The eventfd bell."""

from __future__ import annotations

import os
import select

from ringcast.mq.doorbell import Doorbell


def readable(bell):
    return bool(select.select([bell], [], [], 0)[0])


def test_rung_until_drained():
    bell = Doorbell.create()
    assert not bell.drain()
    for _ in range(3):
        bell.ring()
    assert readable(bell)
    assert readable(bell)
    assert bell.drain()
    assert not readable(bell)
    assert not bell.drain()
    bell.close()


def test_a_full_counter_is_no_error():
    bell = Doorbell.create()
    os.eventfd_write(bell.fileno(), 2**64 - 2)
    bell.ring()
    assert readable(bell)
    assert bell.drain()
    bell.close()


def test_an_inherited_bell_is_the_same_bell_and_closes_alone():
    bell = Doorbell.create()
    other = Doorbell.inherit(bell.fileno())
    other.ring()
    for _ in range(2):
        other.close()
    assert bell.drain()
    assert not os.get_inheritable(bell.fileno())
    bell.close()
