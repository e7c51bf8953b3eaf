"""What is special about the channel inside one process."""

from __future__ import annotations

from ringcast.mq.inproc import InprocChannel


def test_a_new_reader_gets_again_what_was_not_committed():
    channel = InprocChannel("a>b", "a", ["b"])
    sender, first = channel.sender(), channel.receiver()
    for payload in (b"0", b"1", b"2"):
        assert sender.try_send(payload)
    assert first.try_receive() == b"0"
    first.commit()
    assert first.try_receive() == b"1"
    second = channel.receiver()
    assert [second.try_receive() for _ in range(3)] == [b"1", b"2", None]
    for end in (sender, first, second, channel):
        end.close()
