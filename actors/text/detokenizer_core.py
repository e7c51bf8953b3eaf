"""The detokenizer's core: tokens become the client's chunks, and stop strings end streams.

A stream's life, as the scheduler's messages move it:

    OpenStream          -> open (with the text state of its `resumed` tokens, see text_stream.py)
    StreamStep entry    open -> open, or -> ended here (by a stop string, or an error of ours)
    StreamEnd           open -> gone, with the scheduler's finish
    StreamStep entry    ended here: dropped, it was under way when the stream ended
    StreamEnd           ended here -> gone: it acknowledges our StopStream, and nothing more is said
    the scheduler lost  -> gone, nothing more is said: its client hands the request over again

A stream's number is its scheduler's: those of several replicas are told apart by who sends. What
comes for a stream that is gone is dropped. Tokens are taken as they come; chunks are made once
per batch of messages, in `flush`, one message per client.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from ...mq import codec
from ...mq.config import ModelSpec
from ...mq.messages import (
    Chunk,
    Chunks,
    OpenStream,
    Ping,
    PromptLogprobs,
    ResetPrefixCache,
    StopStream,
    StreamEnd,
    StreamStep,
)
from ..core import PeerAdded, PeerLost, Send
from .logprob_rows import StepLogprobs, token_id_name
from .parsers.output_parser import markers_of
from .text_stream import TextStream
from .text_tokenizer import TextTokenizer
from .token_decoder import NoTokenDecoders, TokenDecoders

logger = logging.getLogger(__name__)


class DetokenizerCore:
    """See actors/core.py.

    tokenizer: None where the engine has none (skip_tokenizer_init); then there is no text.
    """

    def __init__(self, spec: ModelSpec, tokenizer: TextTokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._decoders = TokenDecoders(tokenizer) if tokenizer is not None else NoTokenDecoders()
        self._left_out: dict[frozenset[str], frozenset[int]] = {}  # by the markers that are kept
        if not self._decoders.by_bytes:
            logger.warning("%s: this tokenizer's decoder is of a slower kind", spec.name)
        self._by_scheduler: dict[str, dict[int, TextStream]] = defaultdict(dict)
        self._touched: dict[TextStream, None] = {}  # in the order of their first change
        # By scheduler, stream to number of tokens, not yet told.
        self._stopped: dict[str, dict[int, int]] = defaultdict(dict)
        self._num_tokens = 0
        self._num_chunks = 0
        self._num_dropped = 0

    def handle(self, source: str, message: Any, now: float) -> Sequence[Send]:
        if isinstance(message, StreamStep):
            self._step(source, message)
            for end in message.ends:
                self._end(source, end)
        elif isinstance(message, OpenStream):
            self._open(source, message)
        elif isinstance(message, Ping | ResetPrefixCache):
            return (Send(f"client.{message.client}", message),)
        elif isinstance(message, PeerLost):
            self._forget(source)
        else:
            assert isinstance(message, PeerAdded), f"{source} sent {message!r}"
        return ()

    def flush(self, now: float) -> Sequence[Send]:
        sends = [
            Send(scheduler, StopStream(stream, num_tokens))
            for scheduler, stopped in self._stopped.items()
            for stream, num_tokens in stopped.items()
        ]
        self._stopped.clear()
        by_client: dict[int, list[Chunk]] = {}
        for stream in self._touched:
            if (chunk := stream.take()) is not None:
                by_client.setdefault(stream.client, []).append(chunk)
        self._touched.clear()
        for client, chunks in by_client.items():
            self._num_chunks += len(chunks)
            sends.append(Send(f"client.{client}", Chunks(chunks)))
        return sends

    def statistics(self) -> dict[str, float]:
        """dropped: entries seen before, and entries of streams that ended or never were."""
        return {
            "streams": sum(len(streams) for streams in self._by_scheduler.values()),
            "tokens": self._num_tokens,
            "chunks": self._num_chunks,
            "dropped": self._num_dropped,
        }

    def _open(self, source: str, opened: OpenStream) -> None:
        streams = self._by_scheduler[source]
        assert opened.stream not in streams, f"stream {opened.stream} is open already"
        stream = streams[opened.stream] = self._stream(opened)
        if not opened.resumed:
            return
        try:
            stream.resume(self._naming(stream))
        except Exception as error:  # as in _push
            logger.exception("resuming %s failed", opened.request_id)
            stream.fail(f"it can't be resumed: {error}")
        if stream.finish is not None:
            self._touched[stream] = None
            self._stopped[source][opened.stream] = stream.num_tokens

    def _stream(self, opened: OpenStream) -> TextStream:
        parsers, skip = opened.output.parsers, opened.params.skip_special_tokens
        if parsers is None or not skip or self._tokenizer is None:
            return TextStream(opened, self._decoders.open(skip, continues=True))
        # Parsers see the special tokens that they look for, and no others.
        markers = markers_of(parsers)
        left_out = self._left_out.get(markers)
        if left_out is None:
            kept = {self._tokenizer.backend.token_to_id(marker) for marker in markers}
            left_out = self._left_out[markers] = self._tokenizer.special_token_ids - kept
        return TextStream(opened, self._decoders.open(False, continues=True), left_out)

    def _naming(self, stream: TextStream) -> Callable[[int], bytes]:
        """What the stream's client wants a token to be called in log-probabilities."""
        return token_id_name if stream.opened.output.tokens_as_ids else self._decoders.bytes_of

    def _forget(self, scheduler: str) -> None:
        """Its streams, and those of no other. (Of who is no scheduler there are none.)"""
        for stream in self._by_scheduler.pop(scheduler, {}).values():
            self._touched.pop(stream, None)
        self._stopped.pop(scheduler, None)

    def _step(self, source: str, step: StreamStep) -> None:
        streams, stopped = self._by_scheduler[source], self._stopped[source]
        last = {end.stream: end.num_tokens - 1 for end in step.ends if end.reason == "stop"}
        logprobs = StepLogprobs(step.logprobs) if step.logprobs is not None else None
        numbers = codec.longs(step.streams).tolist()
        indices = codec.ints(step.token_index).tolist()
        ids = codec.ints(step.token_ids).tolist()
        self._num_tokens += len(ids)
        for part in step.prompt_logprobs:
            self._add_prompt_logprobs(source, part)
        for number, vector in step.pooled:
            if (pooled := streams.get(number)) is not None:
                pooled.pooled = vector
        for number, num_cached_tokens in step.cached:
            if (cached := streams.get(number)) is not None:
                cached.num_cached_tokens = num_cached_tokens
        for number, timing in step.timings:
            if (begun := streams.get(number)) is not None:
                begun.timing = timing
        for at, (number, index, token_id) in enumerate(zip(numbers, indices, ids, strict=True)):
            stream = streams.get(number)
            if stream is None or stream.finish is not None:
                self._num_dropped += 1
                continue
            self._touched[stream] = None
            if not self._push(stream, index, token_id, last.get(number) == index):
                self._num_dropped += 1
            elif logprobs is not None:
                self._add_logprobs(stream, logprobs, at, index)
            if stream.finish is not None:
                stopped[number] = stream.num_tokens

    def _push(self, stream: TextStream, index: int, token_id: int, ends_here: bool) -> bool:
        try:
            return stream.push(index, token_id, ends_here)
        except Exception as error:  # the library's decoder may refuse tokens: that costs one stream
            logger.exception("decoding token %d of %s failed", token_id, stream.opened.request_id)
            stream.fail(f"token {token_id} can't be decoded: {error}")
            return False

    def _add_prompt_logprobs(self, source: str, part: PromptLogprobs) -> None:
        stream = self._by_scheduler[source].get(part.of)
        if stream is None or stream.finish is not None:
            return
        stream.add_prompt_logprobs(part, self._naming(stream))
        if stream.finish is not None:
            self._touched[stream] = None
            self._stopped[source][part.of] = stream.num_tokens

    def _add_logprobs(
        self, stream: TextStream, logprobs: StepLogprobs, at: int, index: int
    ) -> None:
        if stream.num_logprobs is not None:
            row = logprobs.row(at, index, stream.num_logprobs, self._naming(stream))
            if row is not None:
                stream.add_logprobs(row)

    def _end(self, source: str, end: StreamEnd) -> None:
        stream = self._by_scheduler[source].pop(end.stream, None)
        if stream is None:
            self._num_dropped += 1
            return
        self._stopped[source].pop(end.stream, None)
        if stream.finish is not None:
            return
        self._touched[stream] = None
        try:
            stream.end(end)
        except Exception as error:  # as in _push
            logger.exception("decoding the end of %s failed", stream.opened.request_id)
            stream.fail(f"its end can't be decoded: {error}")
