"""Who answers the requests of a batch: the contract."""

from __future__ import annotations

from types import TracebackType
from typing import Protocol, Self

from .lines import BatchRequest, BatchResponse


class Answerer(Protocol):
    """An async context manager: entering it waits until it can answer.

    Entering raises ConfigError or EngineDeadError.
    """

    async def answer(self, request: BatchRequest) -> BatchResponse:
        """What the HTTP server says to that, be it an error. May be called many times at once.

        Raises OverloadedError when it is to be asked again later, and EngineDeadError when it can
        never answer any more. Cancelling it aborts the request.
        """

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...
