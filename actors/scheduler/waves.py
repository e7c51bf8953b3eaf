"""When replicas that step together step: a scheduler's place in the *waves*.

Such replicas meet in each step, since each has a part of the experts. So all must send their
workers equally many plans, whether they have work or not, and all must know when to stop.

1. Messages start waves, and never end them. Who has work while paused says WantWave(w + 1) to the
   coordinator, which says StartWave(w + 1) to all. Who is still in wave w goes on to its end first.
2. In a wave each replica sends plans 1, 2, 3, ...: without work *dummy* ones, which have no rows.
   Each says whether its replica has work that isn't done. In step k the workers tell each other,
   and the output says whether anybody had.
3. Plans 1 to D (max_steps_in_flight) may be sent at once, and plan k + D after the output of step k
   if somebody had work in it. At the first output by which nobody had, nothing more may be sent:
   later outputs that say otherwise don't count. All see the same outputs in the same order, so all
   send equally many plans, and nobody has to ask.
4. A wave has ended when all its outputs are back. Work that came too late starts the next one.

    state     | event                     | then
    ----------|---------------------------|--------------------------------------------------
    paused    | StartWave(w + 1)          | in wave w + 1
    in wave w | StartWave(w + 1)          | in wave w, and w + 1 follows at once
    any       | StartWave of another wave | nothing: it is known, or of an earlier life
    in wave w | its last output           | paused

A coordinator's messages come to all replicas in the same order, so all take the same ones for new.
What a dead coordinator has said to some of them only, the next one hears: it asks (AskWave), and
who knows of a wave that others may not have heard of says WantWave again.
"""

from __future__ import annotations

from ...mq.messages import AskWave, StartWave, WantWave, WaveStep


class Waves:
    """most_ahead: D. dummy_steps: that were sent. wave: the one that it is in, or was in last."""

    def __init__(self, most_ahead: int) -> None:
        self.wave = self.dummy_steps = 0
        self._most_ahead = most_ahead
        self._known = 0  # the last wave that was started: this one or the next
        self._wanted = 0  # the last wave that the coordinator was asked for
        self._sent = self._heard = self._may = 0  # plans of this wave
        self._ends = False  # nobody had work in a step of it
        self._asked = False

    @property
    def paused(self) -> bool:
        return self._heard == self._may

    @property
    def may_send(self) -> bool:
        return self._sent < self._may

    def words(self, has_work: bool) -> list[WantWave]:
        """What the coordinator is to hear."""
        asked, self._asked = self._asked, False
        if not self.paused:
            return [WantWave(self._known)] if asked else []
        if has_work and (asked or self._wanted == self.wave):
            self._wanted = self.wave + 1
            return [WantWave(self._wanted)]
        return []

    def start(self, message: StartWave) -> None:
        if message.wave == self._known + 1:
            self._known = message.wave
            self._go_on()

    def ask(self, message: AskWave) -> None:
        self._asked = True

    def send(self, has_work: bool, is_dummy: bool) -> WaveStep:
        """The next plan's place. Only while `may_send`."""
        assert self._sent < self._may
        self._sent += 1
        self.dummy_steps += is_dummy
        return WaveStep(self.wave, self._sent, has_work)

    def hear(self, any_work: bool) -> None:
        """The next step's output is back."""
        assert self._heard < self._sent
        self._heard += 1
        if not any_work:
            self._ends = True
        elif not self._ends:
            self._may += 1
        self._go_on()

    def statistics(self) -> dict[str, float]:
        return {"waves": self.wave, "dummy_steps": self.dummy_steps}

    def check(self) -> None:
        """Assert that this can be."""
        assert self._heard <= self._sent <= self._may <= self._heard + self._most_ahead
        assert self.wave <= self._known <= self.wave + 1
        assert self._known == self.wave or not self.paused, "a wave should have begun"

    def _go_on(self) -> None:
        """To the next wave, if this one has ended and the next is known."""
        if self.paused and self._known > self.wave:
            self.wave = self._wanted = self._known
            self._sent = self._heard = 0
            self._may = self._most_ahead
            self._ends = False
