"""What a client doesn't let into its ledger: what the engine can't do, or has no room for."""

from __future__ import annotations

from typing import Any

from ..mq.config import ModelSpec
from ..mq.errors import InvalidRequestError, OverloadedError
from ..mq.tallies import QUESTIONS, REQUESTS, Tallies

DRAINING = "the server is shutting down and takes no new requests"
_PRIORITIES = 1 << 63  # as far as a message's integers go


class Admission:
    """policy, tallies, takes_extra_args: as in EngineClient."""

    def __init__(
        self, spec: ModelSpec, policy: str, tallies: Tallies, takes_extra_args: bool
    ) -> None:
        self._spec = spec
        self._policy = policy
        self._tallies = tallies
        self._takes_extra_args = takes_extra_args

    def check_kind(self, pooled: bool) -> None:
        """Raises InvalidRequestError unless this model makes vectors (pooled), or generates."""
        if pooled == (self._spec.pooling is not None):
            return
        name = self._spec.name
        if pooled:
            raise InvalidRequestError(
                f"the model {name!r} generates text and has no embeddings API: embeddings are what "
                "an embedding model has, such as all-minilm-l6-v2",
                param="model",
            )
        raise InvalidRequestError(
            f"the model {name!r} makes embeddings and can't generate text: /v1/embeddings and "
            "LLM.embed are what it has",
            param="model",
        )

    def check_priority(self, priority: int) -> None:
        """Raises InvalidRequestError for one that has no effect."""
        if type(priority) is not int or not -_PRIORITIES <= priority < _PRIORITIES:
            raise InvalidRequestError(
                f"priority must be an integer of 64 bits, got {repr(priority)[:80]}",
                param="priority",
            )
        if priority and self._policy != "priority":
            raise InvalidRequestError(
                f"priority must be 0, got {priority}: this engine serves who came first "
                "(--scheduling-policy fcfs); start it with --scheduling-policy priority",
                param="priority",
            )

    def check_extra_args(self, given: dict[str, Any] | None) -> None:
        """Raises InvalidRequestError where nobody reads them."""
        if given and not self._takes_extra_args:
            raise InvalidRequestError(
                "extra_args (vllm_xargs) must be empty: they are for logits processors of your "
                "own, and this engine was started without --logits-processors",
                param="extra_args",
            )

    def take_place(self, word: int, most: int) -> None:
        """Count one more in the tallies under `word`. Raises OverloadedError if there are as many
        as there may be, of requests and questions together."""
        tallies = self._tallies
        with tallies.locked():
            taken = tallies.total(REQUESTS, QUESTIONS)
            if taken < most:
                tallies.add(word, 1)
                return
        raise OverloadedError(
            f"{taken} requests are running or waiting, as many as max_num_queued_reqs allows"
        )
