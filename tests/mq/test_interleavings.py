"""No wake-up is lost, in any order of what two ends do to the memory they share.

The ends are the real ones, over a ring. Each runs in a thread of its own, but one at a time: every
load of a watched word, every ring and every drain waits for its turn, and all orders of the turns
are tried, one run each. Stores go into the end's own buffer first, as on x86, and from there to
memory in order, when it is the buffer's turn; a fence, and a system call that rings or drains,
waits until the buffer is empty. If nobody can go on but somebody sleeps, a wake-up is lost.

Without the fences the same search does find lost wake-ups, so it isn't blind.
"""

from __future__ import annotations

import contextlib
import random
import threading

import pytest

from ringcast.mq import ends
from ringcast.mq.board import CURSORS, LINE, PUBLISHED, WANTED, WRITER_DEAD
from ringcast.mq.endpoint import ChannelOwner, open_receiver, open_sender
from ringcast.mq.errors import PeerDeadError

CAPACITY = 1024
FULL = bytes(CAPACITY - 16)
PATIENCE = 20.0


class GivenUp(BaseException):
    """Raised in a participant whose run is over."""


class Participant:
    """One end's thread: it runs between two turns, and says at each when it could go on."""

    def __init__(self, body) -> None:
        self.stores = []  # (array, index, value): stored, and not yet in memory
        self.can_go_on = lambda: True
        self.error = None
        self.ended = False
        self._go, self._paused = threading.Semaphore(0), threading.Semaphore(0)
        self._given_up = False
        self._thread = threading.Thread(target=self._run, args=(body,))
        self._thread.start()

    def _run(self, body):
        try:
            self.turn()
            body()
        except GivenUp:
            pass
        except BaseException as error:
            self.error = error
        self.ended = True
        self._paused.release()

    def turn(self, can_go_on=lambda: True):
        """Called in the thread: wait until it is this end's turn."""
        self.can_go_on = can_go_on
        self._paused.release()
        self._go.acquire()
        if self._given_up:
            raise GivenUp

    def fence(self):
        self.turn(lambda: not self.stores)

    def wait_until_paused(self):
        assert self._paused.acquire(timeout=PATIENCE)

    def step(self):
        self._go.release()
        self.wait_until_paused()

    def flush(self):
        array, index, value = self.stores.pop(0)
        array[index] = value

    def finish(self):
        self._given_up = True
        self._go.release()
        self._thread.join()


class Watched:
    """An array of the board, as one end sees it."""

    def __init__(self, run, array, indices) -> None:
        self._run, self._array, self._indices = run, array, indices

    def __getitem__(self, index):
        me = self._run.me()
        if me is None or index not in self._indices:
            return self._array[index]
        me.turn()
        own = [value for array, at, value in me.stores if array is self._array and at == index]
        return own[-1] if own else self._array[index]

    def __setitem__(self, index, value):
        me = self._run.me()
        if me is None or index not in self._indices:
            self._array[index] = value
        else:
            me.stores.append((self._array, index, value))

    def __iter__(self):
        return (self[index] for index in range(len(self._array)))


class Bell:
    def __init__(self, run) -> None:
        self._run, self.rung = run, False

    def ring(self):
        if me := self._run.me():
            me.fence()
        self.rung = True

    def drain(self):
        if me := self._run.me():
            me.fence()
        self.rung = False

    def close(self):
        pass


class Run:
    """One ring whose ends are watched, and the order in which things happen to it."""

    def __init__(self, stack, num_readers, watched, fenced):
        names = [f"r.{i}" for i in range(num_readers)]
        self.owner = ChannelOwner.create("ring", "e", "w", names, "Any", CAPACITY, "")
        self.sender = open_sender(self.owner.endpoint("w"))
        self.receivers = [open_receiver(self.owner.endpoint(name)) for name in names]
        self.participants = []
        self._watched = watched
        for everyone in (self.owner, self.sender, *self.receivers):
            stack.callback(everyone.close)
            self._watch(stack, everyone._board)
        self._replace([Bell(self) for _ in range(1 + num_readers)])
        stack.enter_context(pytest.MonkeyPatch.context()).setattr(
            ends, "FENCE", self._fence(fenced)
        )

    def _watch(self, stack, board):
        real = {"words": board.words, "sleepers": board.sleepers}
        stack.callback(board.__dict__.update, real)  # before it is closed
        board.words = Watched(self, real["words"], self._watched)
        board.sleepers = Watched(self, real["sleepers"], range(64))

    def _replace(self, bells):
        real = [*self.owner.bells, self.sender._bell, *self.sender._reader_bells]
        self.owner.bells = bells
        self.sender._words = self.sender._board.words
        self.sender._sleepers = self.sender._board.sleepers
        self.sender._bell, *self.sender._reader_bells = bells
        for receiver, bell in zip(self.receivers, bells[1:], strict=True):
            real += [receiver._bell, receiver._writer_bell]
            receiver._words = receiver._board.words
            receiver._bell, receiver._writer_bell = bell, bells[0]
        for bell in real:
            bell.close()

    def _fence(self, fenced):
        run = self

        class Fence:
            def __enter__(self):
                if fenced and (me := run.me()):
                    me.fence()

            def __exit__(self, *exception):
                pass

        return Fence()

    def me(self):
        """The participant whose thread this is; None while the ring is being prepared."""
        current = threading.current_thread()
        return next((p for p in self.participants if p._thread is current), None)

    def sleep(self, end):
        """What an event loop does: until the bell rings if it may sleep, and then disarm."""
        if end.arm():
            self.me().turn(lambda: end._bell.rung)
        end.disarm()

    def go(self, bodies, choose):
        """Run these to their end, in the order that `choose(how many could go on)` says. Whether
        all came to it."""
        self.participants = [Participant(body) for body in bodies]
        for participant in self.participants:
            participant.wait_until_paused()
        while options := self._options():
            options[choose(len(options))]()
        ended = all(participant.ended for participant in self.participants)
        for participant in self.participants:
            participant.finish()
            if participant.error is not None:
                raise participant.error
        self.participants = []
        return ended

    def _options(self):
        steps = [p.step for p in self.participants if not p.ended and p.can_go_on()]
        return steps + [p.flush for p in self.participants if p.stores]


def every_order():
    """Functions `choose`, one for each run, which together make all choices there are."""
    path = []  # [the option taken, how many there were]

    while True:
        depth = 0

        def choose(options):
            nonlocal depth
            if depth == len(path):
                path.append([0, options])
            depth += 1
            return path[depth - 1][0]

        yield choose
        while path and path[-1][0] + 1 == path[-1][1]:
            path.pop()
        if not path:
            return
        path[-1][0] += 1


def some_orders(count):
    rng = random.Random(count)
    return [rng.randrange] * count


# The races. Each prepares its ring and returns what is to run at the same time.


def receive(run, receiver, count):
    def body():
        for _ in range(count):
            while receiver.try_receive() is None:
                run.sleep(receiver)

    return body


def a_record_and_a_sleeper(run):
    return [lambda: run.sender.try_send(b"1"), receive(run, run.receivers[0], 1)]


def two_records_and_a_sleeper(run):
    def send():
        for payload in (b"1", b"2"):
            run.sender.try_send(payload)

    return [send, receive(run, run.receivers[0], 2)]


def commits_and_a_sleeper(run):
    assert run.sender.try_send(FULL)
    assert not run.sender.try_send(b"1")
    for receiver in run.receivers:
        assert receiver.try_receive() == FULL

    def send():
        while not run.sender.try_send(b"1"):
            run.sleep(run.sender)

    return [send, *(receiver.commit for receiver in run.receivers)]


def a_death_and_a_sleeper(run):
    def read():
        with pytest.raises(PeerDeadError):
            receive(run, run.receivers[0], 1)()

    return [lambda: run.owner.mark_dead("w"), read]


def a_reset_and_a_sleeper(run):
    bodies = commits_and_a_sleeper(run)
    return [bodies[0], lambda: run.owner.reset("r.0")]


RECORDS_WORDS = {PUBLISHED}
COMMIT_WORDS = {WANTED, CURSORS, CURSORS + LINE}


def search(race, num_readers, words, orders, fenced=True):
    """(how many runs there were, how many of them lost a wake-up)"""
    runs = lost = 0
    for choose in orders:
        runs += 1
        with contextlib.ExitStack() as stack:
            run = Run(stack, num_readers, words, fenced)
            lost += not run.go(race(run), choose)
        if lost:
            break
    return runs, lost


@pytest.mark.parametrize(
    ("race", "words"),
    [
        pytest.param(a_record_and_a_sleeper, RECORDS_WORDS, marks=pytest.mark.slow),
        pytest.param(commits_and_a_sleeper, COMMIT_WORDS, marks=pytest.mark.slow),
        (a_death_and_a_sleeper, {WRITER_DEAD}),
        (a_reset_and_a_sleeper, COMMIT_WORDS),
    ],
)
def test_no_order_loses_a_wake_up(race, words):
    runs, lost = search(race, 1, words, every_order())
    assert lost == 0
    assert runs > 20


@pytest.mark.parametrize(
    ("race", "num_readers", "words"),
    [(two_records_and_a_sleeper, 1, RECORDS_WORDS), (commits_and_a_sleeper, 2, COMMIT_WORDS)],
)
def test_some_of_very_many_orders(race, num_readers, words):
    assert search(race, num_readers, words, some_orders(300)) == (300, 0)


@pytest.mark.parametrize(
    ("race", "words"),
    [(a_record_and_a_sleeper, RECORDS_WORDS), (commits_and_a_sleeper, COMMIT_WORDS)],
)
def test_without_fences_some_order_does(race, words):
    assert search(race, 1, words, every_order(), fenced=False)[1] == 1
