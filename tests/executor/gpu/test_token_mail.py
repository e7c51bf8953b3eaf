"""Sampled tokens on their way to the stages before, with threads for processes."""

from __future__ import annotations

import os
import threading

import numpy as np
import pytest
import torch

from ringcast.executor.gpu import token_mail
from ringcast.executor.gpu.token_mail import TokenMail, mail_bytes
from ringcast.mq.errors import PeerDeadError

ONE = np.ones(1, np.int64)
OFFSET = 64


class Mail:
    def __init__(self, readers=2, slots=3, tokens=5, timeout=30.0):
        self._fd, self._shape, self._timeout = (
            os.memfd_create("mail"),
            (readers, slots, tokens),
            timeout,
        )
        os.ftruncate(self._fd, OFFSET + mail_bytes(*self._shape))

    def end(self, reader=None):
        """An end, its array, and what moves a slot."""
        mail = TokenMail(self._fd, self._shape, reader, self._timeout, OFFSET)
        words = torch.zeros(1, self._shape[2])
        return mail, words.numpy().view(np.int32)[0], mail.bind(ONE, words)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        os.close(self._fd)


def test_every_reader_gets_every_item_in_order():
    items, got = 300, [[], []]
    with Mail() as mail:
        ends = [mail.end(reader) for reader in (0, 1)]

        def receive(reader):
            end, values, move = ends[reader]
            for _ in range(items):
                end.wait()
                move()
                got[reader].append(values.tolist())

        threads = [threading.Thread(target=receive, args=(reader,)) for reader in (0, 1)]
        for thread in threads:
            thread.start()
        end, values, move = mail.end()
        for item in range(items):
            values[:] = np.arange(5) + 1000 * item
            end.wait()
            move()
        for thread in threads:
            thread.join()
    want = [[1000 * item + i for i in range(5)] for item in range(items)]
    assert got == [want, want]


def test_there_is_room_until_the_slowest_reader_is_behind():
    with Mail(readers=2, slots=2) as mail:
        (writer, _, send), (one, _, take_one), (other, _, take_other) = (
            mail.end(), mail.end(0), mail.end(1),
        )  # fmt: skip
        assert not one.is_ready
        for _ in range(2):
            assert writer.is_ready
            send()
        assert not writer.is_ready
        take_one()
        assert not writer.is_ready
        take_other()
        assert writer.is_ready
        assert one.is_ready
        assert other.is_ready
        take_one()
        assert not one.is_ready


def test_half_an_item_is_none():
    with Mail(readers=1) as mail:
        (_, values, send), (reader, _, _) = mail.end(), mail.end(0)
        values[:] = 7
        send()
        whole = reader._slots[0].copy()
        for missing in range(5):
            reader._slots[0] = whole
            reader._slots[0, missing] = 0
            assert not reader.is_ready
        reader._slots[0] = whole
        assert reader.is_ready


def test_numbers_begin_again(monkeypatch):
    monkeypatch.setattr(token_mail, "_NUMBERS", 8)
    with Mail(readers=1, slots=2) as mail:
        (_, values, send), (reader, heard, take) = mail.end(), mail.end(0)
        for item in range(30):
            assert not reader.is_ready
            values[:] = item
            send()
            assert reader.is_ready
            take()
            assert heard.tolist() == [item] * 5


def test_who_waits_for_nobody():
    with Mail(timeout=0.05) as mail:
        (writer, _, send), (reader, _, _) = mail.end(), mail.end(0)
        with pytest.raises(TimeoutError, match=r"waited 0\.05 s for the last stage's tokens"):
            reader.wait()
        for _ in range(3):
            send()
        with pytest.raises(TimeoutError, match="room for tokens"):
            writer.wait()
        reader.leave()
        with pytest.raises(PeerDeadError, match="another stage"):
            writer.wait()


def test_a_slot_is_read_before_that_is_said(monkeypatch):
    """On a processor that may store earlier than it loads."""
    taken = []
    with Mail(readers=1) as mail:
        (_, values, send), (reader, heard, take) = mail.end(), mail.end(0)
        monkeypatch.setattr(token_mail, "WEAK", True)
        monkeypatch.setattr(
            token_mail, "order", lambda: taken.append((heard.tolist(), int(reader._taken[0])))
        )
        values[:] = 7
        send()
        take()
        assert taken == [([7] * 5, 0)]
        assert reader._taken[0] == 1
