"""Profiles that clients have asked of the workers: who has asked, and who has yet to answer.

`ProfileAsks` is a client's side, `Profiling` the supervisor's. An ask goes to all workers that are
ready; when the last has answered, or died, so is the client.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable

from ..mq.errors import EngineDeadError, InvalidRequestError, RequestFailedError
from ..mq.messages import Message
from ..mq.supervision import Profile, Profiled


class ProfileAsks:
    """send: to the supervisor."""

    def __init__(self, send: Callable[[Message], object]) -> None:
        self._send = send
        self._waiting: dict[int, asyncio.Future[Profiled]] = {}

    async def ask(self, start: bool) -> str:
        """The workers' report. Raises InvalidRequestError where it is refused, RequestFailedError
        for what went wrong, EngineDeadError.
        """
        number = time.monotonic_ns()
        answer: asyncio.Future[Profiled] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        self._send(Profile(number, start))
        try:
            profiled = await answer
        finally:
            del self._waiting[number]
        if profiled.error:
            kind = InvalidRequestError if profiled.refused else RequestFailedError
            raise kind(profiled.error)
        return profiled.report

    def answered(self, message: Profiled) -> None:
        answer = self._waiting.get(message.ask)
        if answer is not None and not answer.done():
            answer.set_result(message)

    def fail(self, error: str) -> None:
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(EngineDeadError(error))


class _Ask:
    def __init__(self, client: str, workers: Iterable[str]) -> None:
        self.client = client
        self.missing = set(workers)
        self.answers: dict[str, Profiled] = {}


class Profiling:
    """What each method returns is to be sent: to whom, and what."""

    def __init__(self) -> None:
        self._asks: dict[int, _Ask] = {}

    def ask(
        self, client: str, message: Profile, workers: list[str]
    ) -> list[tuple[str, Profile | Profiled]]:
        """workers: those that are ready."""
        if not workers:
            return [(client, Profiled(message.ask, error="no worker is ready now"))]
        self._asks[message.ask] = _Ask(client, workers)
        return [(worker, message) for worker in workers]

    def answered(self, worker: str, message: Profiled) -> list[tuple[str, Profiled]]:
        ask = self._asks.get(message.ask)
        if ask is None or worker not in ask.missing:
            return []
        ask.missing.discard(worker)
        ask.answers[worker] = message
        return self._finish(message.ask, ask)

    def lost(self, worker: str) -> list[tuple[str, Profiled]]:
        """It has died, and its profile with it."""
        return [
            send
            for number in [n for n, ask in self._asks.items() if worker in ask.missing]
            for send in self.answered(worker, Profiled(number, error=f"{worker} died"))
        ]

    def _finish(self, number: int, ask: _Ask) -> list[tuple[str, Profiled]]:
        if ask.missing:
            return []
        del self._asks[number]
        answers = [ask.answers[worker] for worker in sorted(ask.answers)]
        failed = [answer for answer in answers if answer.error]
        if failed:
            error = "; ".join(dict.fromkeys(answer.error for answer in failed))
            refused = all(answer.refused for answer in failed)
            return [(ask.client, Profiled(number, error=error, refused=refused))]
        report = "\n\n".join(answer.report for answer in answers if answer.report)
        return [(ask.client, Profiled(number, report=report))]
