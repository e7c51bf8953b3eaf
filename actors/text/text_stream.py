"""One choice's way from token ids to text: the detokenizer's state for one stream.

A stream is open until it has a `finish`, its one terminal message. It gets one by

    a stop string in its text      Finish("stop", the string); the scheduler still has to be told
    the scheduler's StreamEnd      Finish(its reason), after the text that was held back
    a gap in the tokens            Finish("error"): a broken invariant costs this stream alone

and takes no token after that. `take` makes a chunk of what is new since the last one, if one is
due: with `delta` at once, otherwise after CHECKPOINT_TOKENS. So a client never has to ask for much
again when an engine dies. After a takeover they come more often, because the client waits to see
that the request gets on (frontend/takeover.py).

A stream that is `resumed` begins where another one was lost. Its tokens are taken again, and make
nothing: what they bring back is half a character, what may be a stop string, the number of tokens.
Since text does not depend on how it is cut into chunks, all goes on as if nothing had been.

A stream whose output is parsed (parsers/) is a chat's that is rendered: its text goes through an
OutputParser, and its events are made from what comes out. The text of one that is not rendered is
left to its client to be parsed, with the special tokens that the parsers look for in it.
"""

from __future__ import annotations

from collections.abc import Callable, Set

from ...mq import codec
from ...mq.messages import (
    Chunk,
    ErrorInfo,
    Finish,
    FinishReason,
    OpenStream,
    PromptLogprobs,
    StreamEnd,
    Timing,
    TokenLogprobs,
)
from .event_renderer import EventRenderer
from .logprob_rows import LogprobRow, StepLogprobs, pack_rows
from .parsers.output_parser import OutputParser, opener_of
from .parsers.parser import Delta
from .stop_strings import StopStrings
from .token_decoder import TokenDecoder

CHECKPOINT_TOKENS = 64
CHECKPOINT_TOKENS_AFTER_TAKEOVER = 8
_NO_LOGPROBS: tuple[TokenLogprobs | None, list[bytes | None]] = (None, [])


class TextStream:
    """num_tokens: output tokens so far. num_logprobs: the request's K, or None.

    pooled: the vector of a pooling model, which has no tokens.
    left_out: tokens that are no text, beside those that `decoder` leaves out.
    """

    __slots__ = (
        "_chunk_tokens",
        "_decoder",
        "_deltas",
        "_first_index",
        "_ids",
        "_left_out",
        "_num_prompt_rows",
        "_parser",
        "_prompt_rows",
        "_renderer",
        "_rows",
        "_stops",
        "_text",
        "_unrendered",
        "client",
        "finish",
        "num_cached_tokens",
        "num_logprobs",
        "num_tokens",
        "opened",
        "pooled",
        "timing",
    )

    def __init__(
        self, opened: OpenStream, decoder: TokenDecoder, left_out: Set[int] = frozenset()
    ) -> None:
        params, output = opened.params, opened.output
        self.opened = opened
        self.client = output.client
        self.num_logprobs = params.logprobs
        self.num_tokens = 0
        self.num_cached_tokens = 0
        self.timing: Timing | None = None
        self.finish: Finish | None = None
        self.pooled = b""
        self._decoder = decoder
        self._left_out = left_out
        self._stops = (
            StopStrings(params.stop, params.include_stop_str_in_output) if params.stop else None
        )
        self._renderer = EventRenderer(opened) if output.delta and output.form != "raw" else None
        self._chunk_tokens = _chunk_tokens(opened)
        self._first_index = 0
        self._ids: list[int] = []
        self._text: list[str] = []
        self._rows: list[LogprobRow] = []
        self._unrendered: list[LogprobRow] = []
        self._prompt_rows: list[LogprobRow] = []
        self._num_prompt_rows = 0
        self._parser: OutputParser | None = None
        self._deltas: list[Delta] = []
        if output.parsers is not None:
            if self._renderer is not None:
                self._parser = OutputParser(output.parsers, opened.request_id, opened.choice)
            if output.parsers.thinking:
                self._add_text(opener_of(output.parsers))

    def resume(self, bytes_of: Callable[[int], bytes]) -> None:
        """Take `opened.resumed`. There may be a finish after it, as after any token.

        bytes_of: a token by itself.
        """
        token_ids: list[int] = codec.ints(self.opened.resumed).tolist()
        self._first_index = len(token_ids)
        try:
            for index, token_id in enumerate(token_ids):
                self.push(index, token_id, ends_here=False)
                if self.finish is not None:
                    break
        finally:
            self._ids.clear()
            self._text.clear()
            self._deltas.clear()
        if self._renderer is not None:
            texts = [bytes_of(i).decode(errors="replace") for i in token_ids]
            self._renderer.resume(sum(map(len, texts)))

    def push(self, index: int, token_id: int, ends_here: bool) -> bool:
        """Take the token at `index`; False if it was seen before or can't be taken.

        ends_here: this is the EOS or stop token that ended the stream, which is no text unless
        asked for. Nothing is, where the request wants no text.
        """
        if index != self.num_tokens:
            if index > self.num_tokens:
                self.fail(f"token {index} arrived after {self.num_tokens} tokens")
            return False
        self.num_tokens = index + 1
        self._ids.append(token_id)
        params = self.opened.params
        if params.detokenize and (params.include_stop_str_in_output or not ends_here):
            text = "" if token_id in self._left_out else self._decoder.feed(token_id)
            if self._stops is not None:
                text = self._search(self._stops, text)
            if text:
                self._add_text(text)
        return True

    def add_logprobs(self, row: LogprobRow) -> None:
        self._rows.append(row)

    def add_prompt_logprobs(self, part: PromptLogprobs, bytes_of: Callable[[int], bytes]) -> None:
        """Take what is new of a part of the prompt's; the beginning may have been seen before."""
        known = self._num_prompt_rows
        if part.first > known + 1:
            self.fail(f"prompt_logprobs from {part.first} on arrived after {known}")
            return
        rows = StepLogprobs(part.logprobs)
        num_likeliest = self.opened.params.prompt_logprobs or 0
        for at in range(max(known + 1 - part.first, 0), rows.num_rows):
            row = rows.row(at, part.first + at, num_likeliest, bytes_of)
            assert row is not None
            self._prompt_rows.append(row)
            self._num_prompt_rows += 1

    def end(self, end: StreamEnd) -> None:
        """The scheduler has ended the stream: whatever is held back is text now."""
        if end.reason in ("stop", "length") and end.num_tokens != self.num_tokens:
            self.fail(f"the stream ended after {end.num_tokens} tokens, {self.num_tokens} arrived")
            return
        text = self._decoder.end()
        if self._stops is not None:
            text = self._search(self._stops, text) + self._stops.release()
        if text:
            self._add_text(text)
        if self.finish is None:
            self._finish(end.reason, end.stop_reason, end.error)

    def fail(self, reason: str) -> None:
        """End the stream by an error of ours."""
        message = f"the output of request {self.opened.request_id} is broken: {reason}"
        error = ErrorInfo(message, status=500, type="server_error")
        self._finish("error", error=error)

    def take(self) -> Chunk | None:
        """What is new, as a chunk; None if there is nothing to send now."""
        finish = self.finish
        opened = self.opened
        if finish is None and len(self._ids) < self._chunk_tokens:
            return None
        first_index, rows = self._first_index, self._rows
        text = "".join(self._text)
        data = b"" if self._renderer is None else self._render(self._renderer, text, finish)
        logprobs, texts = pack_rows(rows, first_index) if rows else _NO_LOGPROBS
        prompt, prompt_texts = _NO_LOGPROBS
        if self._prompt_rows:
            prompt, prompt_texts = pack_rows(self._prompt_rows, 0)
            self._prompt_rows = []
        chunk = Chunk(
            opened.request_id,
            opened.incarnation,
            opened.choice,
            first_index,
            _pack(self._ids),
            text,
            data,
            finish,
            logprobs,
            texts,
            prompt,
            prompt_texts,
            self.pooled,
        )
        self._first_index = self.num_tokens
        self._ids.clear()
        self._text.clear()
        if rows:
            self._rows = []
        return chunk

    def _render(self, renderer: EventRenderer, text: str, finish: Finish | None) -> bytes:
        """The chunk's event. Logprobs of tokens without text wait for the next one."""
        if self._rows:
            self._unrendered += self._rows
        failed = finish is not None and finish.reason in ("abort", "error")
        if failed:
            return b""
        parser = self._parser
        if parser is not None:
            deltas, self._deltas = self._deltas, []
            if finish is not None:
                deltas += parser.end()
            if not (deltas or finish):
                return b""
            event = renderer.events(
                deltas, self._unrendered, finish, parser.called, self.num_tokens
            )
        elif text or finish:
            event = renderer.event(text, self._unrendered, finish, self.num_tokens)
        else:
            return b""
        if self._unrendered:
            self._unrendered = []
        return event

    def _add_text(self, text: str) -> None:
        self._text.append(text)
        if self._parser is not None:
            self._deltas += self._parser.feed(text)

    def _search(self, stops: StopStrings, text: str) -> str:
        armed = self.num_tokens >= self.opened.params.min_tokens
        text, found = stops.feed(text, armed)
        if found is not None:
            self._finish("stop", stop_reason=found)
        return text

    def _finish(
        self,
        reason: FinishReason,
        stop_reason: int | str | None = None,
        error: ErrorInfo | None = None,
    ) -> None:
        self.finish = Finish(
            reason=reason,
            num_prompt_tokens=self.opened.num_prompt_tokens,
            num_output_tokens=self.num_tokens,
            num_cached_tokens=self.num_cached_tokens,
            stop_reason=stop_reason,
            error=error,
            timing=self.timing,
        )


def _chunk_tokens(opened: OpenStream) -> int:
    """How many new tokens make a chunk."""
    if opened.output.delta:
        return 1
    return CHECKPOINT_TOKENS_AFTER_TAKEOVER if opened.incarnation else CHECKPOINT_TOKENS


def _pack(token_ids: list[int]) -> bytes:
    if len(token_ids) == 1:  # nearly always, and numpy would take ten times as long
        return token_ids[0].to_bytes(4, "little", signed=True)
    return codec.pack(token_ids)
