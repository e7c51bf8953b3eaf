"""One request in a client's ledger: what was asked, what has come of it, and where to go on.

1. A choice's tokens are counted. A chunk whose tokens have been seen is a duplicate; one that
   leaves a gap is a broken invariant.
2. A choice can be resumed after the last token whose output the caller has. Rendered streams show
   only `Chunk.data`, so there it is the last chunk that had some; what came after it (half a
   character, perhaps a stop string's beginning) is made again. Otherwise every token counts.
3. A request has *begun* when something has come of it since it was last sent. It has *proven*
   itself when a choice has ended since then, or has got PROOF_TOKENS further: more than an engine
   that dies can take with it, so what killed one at some token has met that token again by then.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType

import msgspec

from ..mq.errors import (
    InvalidRequestError,
    OverloadedError,
    RequestFailedError,
    RingcastError,
)
from ..mq.messages import Chunk, ErrorInfo, Finish, Generate, Resume, TokensPrompt
from .mailbox import Mailbox

PROOF_TOKENS = 8
_TOKEN_BYTES = 4
_PROOF_BYTES = PROOF_TOKENS * _TOKEN_BYTES


class RequestHandle:
    """Iterate over it for its chunks; leaving its `with` block aborts it.

    request: what was sent last, or will be while it is parked; the drawn seed is in it.
    emitted: by choice, the token ids handed to the caller so far (i32 bytes).
    finishes: by choice, its terminal, once it has come.
    prompt_token_ids: the prompt as the tokenizer encoded it (i32 bytes), once it has.
    mailbox: where its chunks arrive. streamed: whether each token comes as soon as it is there.
    parked, aborting: see client.py's table. accepted: by the tokenizer, since it was last sent.
    engine: the replica that it was sent to last, or will be. counted: see routing.py; text_counted:
    see text_routing.py.
    at_large: parked, and yet an older incarnation may still be in the engine.
    strikes, blows, struck_with: see takeover.py; the latter is what had died at the last of them.
    """

    __slots__ = (
        "_abort",
        "_discard",
        "_left",
        "_num_unfinished",
        "_prove_at",
        "_rendered",
        "_resume_at",
        "_waiting",
        "aborting",
        "accepted",
        "at_large",
        "begun",
        "blows",
        "counted",
        "emitted",
        "finishes",
        "mailbox",
        "parked",
        "prompt_token_ids",
        "proven",
        "request",
        "streamed",
        "strikes",
        "struck_with",
        "text_counted",
    )

    def __init__(
        self,
        request: Generate,
        mailbox: Mailbox,
        abort: Callable[[RequestHandle], None],
        parked: bool = False,
    ) -> None:
        n = request.params.n
        self.request = request
        self.mailbox = mailbox
        self.emitted = [bytearray() for _ in range(n)]
        self.finishes: list[Finish | None] = [None] * n
        self.prompt_token_ids = b""
        self.parked = parked
        self.aborting = False
        self.at_large = False
        self.accepted = False
        self.begun = False
        self.proven = False
        self.strikes = 0
        self.blows = 0
        self.struck_with = ""
        self.counted = (request.engine, 0)
        self.text_counted = (request.tokenizer, 0, request.detokenizer, 0)
        self._num_unfinished = n
        self.streamed = request.output.delta
        self._rendered = self.streamed and request.output.form != "raw"
        self._resume_at = [0] * n  # bytes of `emitted`
        self._prove_at = [_PROOF_BYTES] * n  # likewise
        self._abort = abort
        self._discard = False
        self._left = False
        self._waiting: list[Chunk] = []
        mailbox.num_open += 1

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def engine(self) -> int:
        return self.request.engine

    @property
    def num_out(self) -> int:
        """Choices that its replica works on."""
        return 0 if self.parked else self._num_unfinished

    @property
    def num_unanswered(self) -> int:
        """1 while its tokenizer works on it."""
        return int(self.open and not (self.parked or self.accepted))

    @property
    def open(self) -> bool:
        return self._num_unfinished > 0

    @property
    def sent(self) -> bool:
        """Whether the engine may know of it."""
        return self.request.incarnation > 0 or not self.parked

    def abort(self) -> None:
        """Ask the engine to end this request: each choice still open gets a Finish("abort")."""
        self._abort(self)

    def discard(self) -> None:
        """Abort, and drop what still arrives."""
        self._discard = True
        self.abort()

    def __aiter__(self) -> RequestHandle:
        return self

    async def __anext__(self) -> Chunk:
        if not self._waiting:
            self._waiting = await self.mailbox.take()
            self._waiting.reverse()
        if not self._waiting:
            raise StopAsyncIteration
        return self._waiting.pop()

    def __enter__(self) -> RequestHandle:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.discard()

    def accept(self, chunk: Chunk) -> bool:
        """Take a chunk into the ledger and hand it on; False if it is a duplicate."""
        choice = chunk.choice
        emitted = self.emitted[choice]
        place = chunk.first_index * _TOKEN_BYTES
        if self.finishes[choice] is not None or place < len(emitted):
            return False
        assert place == len(emitted), (
            f"{self.request_id}: tokens before {chunk.first_index} are missing"
        )
        emitted += chunk.token_ids
        finish = chunk.finish
        self.begun = True
        if chunk.data or not self._rendered or finish is not None:
            self._resume_at[choice] = length = len(emitted)
            if finish is not None or length >= self._prove_at[choice]:
                self.proven = True
        if finish is None:
            if not self._discard:
                self.mailbox.put(chunk)
            return True
        self.finishes[choice] = finish
        self._num_unfinished -= 1
        if finish.reason == "error":
            # One choice has failed, so the request has: the others are not needed any more.
            self._leave(error_of(finish.error))
            self.discard()
        elif not self._discard:
            self.mailbox.put(chunk)
        if not self._num_unfinished:
            self._leave()
        return True

    def park(self, at_large: bool) -> None:
        """Make ready to be handed over again: the next incarnation, from what the caller has."""
        self.at_large = at_large
        if self.parked:
            return
        for emitted, end in zip(self.emitted, self._resume_at, strict=True):
            del emitted[end:]
        has_output = any(self.emitted) or self._num_unfinished < len(self.finishes)
        request = self.request
        self.request = msgspec.structs.replace(
            request,
            incarnation=request.incarnation + 1,
            prompt=TokensPrompt(self.prompt_token_ids) if self.prompt_token_ids else request.prompt,
            resume=self._resume() if has_output else [],
        )
        self.parked = True

    def go_by(self, tokenizer: int) -> None:
        """What is still to be said of it; it is known where that goes."""
        if tokenizer != self.request.tokenizer:
            self.request = msgspec.structs.replace(self.request, tokenizer=tokenizer)

    def hand_over(self, engine: int, tokenizer: int, detokenizer: int) -> Generate:
        """What is sent to `engine` now, by these. Nothing of an earlier incarnation counts from
        here on."""
        self.request = msgspec.structs.replace(
            self.request, engine=engine, tokenizer=tokenizer, detokenizer=detokenizer
        )
        self.parked = self.at_large = self.accepted = self.begun = self.proven = False
        self._prove_at = [place + _PROOF_BYTES for place in self._resume_at]
        return self.request

    def end_as_aborted(self) -> None:
        """Close every open choice here: the engine can't or needn't be asked any more."""
        for choice, finish in enumerate(self.finishes):
            if finish is None:
                self.accept(self._aborted(choice))

    def fail(self, error: RingcastError) -> None:
        self._num_unfinished = 0
        self._leave(error)

    def _resume(self) -> list[Resume]:
        return [
            Resume(choice, bytes(self.emitted[choice]))
            for choice, finish in enumerate(self.finishes)
            if finish is None
        ]

    def _aborted(self, choice: int) -> Chunk:
        num_tokens = len(self.emitted[choice]) // _TOKEN_BYTES
        num_prompt_tokens = len(self.prompt_token_ids) // _TOKEN_BYTES
        finish = Finish("abort", num_prompt_tokens, num_tokens)
        incarnation = self.request.incarnation
        return Chunk(self.request_id, incarnation, choice, num_tokens, b"", finish=finish)

    def _leave(self, error: RingcastError | None = None) -> None:
        if not self._left:
            self._left = True
            self.mailbox.close_one(error)


def error_of(info: ErrorInfo | None) -> RingcastError:
    """What the engine said, as an exception with its `status`, `param` and `code`."""
    if info is None:
        return RequestFailedError("the request failed inside the engine")
    if info.status == OverloadedError.status:
        return OverloadedError(info.message)
    if info.status >= 500:
        return RequestFailedError(info.message)
    error = InvalidRequestError(info.message, param=info.param, code=info.code)
    error.status = info.status
    return error
