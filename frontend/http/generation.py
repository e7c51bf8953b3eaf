"""One HTTP request's generation: its prompts in the engine, its answer as a whole or a stream."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import msgspec
from aiohttp import web

from ...mq.errors import InvalidRequestError, OverloadedError, RingcastError
from ...mq.messages import OutputSpec, ParserSpec, Prompt
from ...mq.sampling_params import SamplingParams
from ..client import EngineClient
from ..handle import RequestHandle
from ..mailbox import Mailbox
from .echo import Echo, add_logprobs, echo_of
from .errors import event_of
from .event_stream import EventStream, WriteBatch
from .protocol import CompletionRequest, GenerationRequest
from .responses import (
    CHUNK_OBJECTS,
    OBJECTS,
    Answer,
    EventUsage,
    Form,
    Usage,
    add_prompt_logprobs,
    add_token_ids,
    usage_of,
)

_ID_PREFIX = {"chat": "chatcmpl-", "completion": "cmpl-"}
_DONE = b"data: [DONE]\n\n"


class Generation:
    """A handler's requests in the engine. The end of its `with` block aborts those still open.

    parsers: what is to be found in a chat's output.
    """

    def __init__(
        self,
        client: EngineClient,
        form: Form,
        request_id: str,
        model: str,
        parsers: ParserSpec | None = None,
    ) -> None:
        self._client = client
        self._form = form
        self._id = _ID_PREFIX[form] + request_id
        self._model = model
        self._parsers = parsers
        self._created = int(time.time())
        self._mailbox = Mailbox()
        self._handles: list[RequestHandle] = []
        self._prompts: Sequence[Prompt] = ()
        self._request: GenerationRequest | None = None

    def __enter__(self) -> Generation:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for handle in self._handles:
            handle.discard()

    def submit(
        self, prompts: Sequence[Prompt], params: SamplingParams, request: GenerationRequest
    ) -> None:
        """One engine request for each prompt.

        Raises OverloadedError, EngineDeadError, InvalidRequestError.
        """
        self._check_room(len(prompts))
        self._prompts, self._request = prompts, request
        keep = request.keep_prompt_tokens(self._client.spec)
        for i, prompt in enumerate(prompts):
            output = OutputSpec(
                client=self._client.index,
                form=self._form if request.stream else "raw",
                delta=request.stream,
                response_id=self._id,
                model=self._model,
                created=self._created,
                index_offset=i * params.n,
                null_usage=request.include_usage,
                parsers=self._parsers,
                continuous_usage=request.continuous_usage,
                tokens_as_ids=request.return_tokens_as_token_ids,
            )
            handle = self._client.submit(
                prompt,
                params,
                output,
                cache_salt=request.cache_salt,
                mailbox=self._mailbox,
                priority=request.priority,
                keep_prompt_tokens=keep,
            )
            self._handles.append(handle)

    async def answer(self, headers: dict[str, str]) -> web.Response:
        """Everything at once. Raises whatever any of the requests ended with."""
        answers = {
            handle.request_id: [Answer(handle, choice) for choice in range(handle.request.params.n)]
            for handle in self._handles
        }
        echoes = await self._echoes()
        while chunks := await self._mailbox.take():
            for chunk in chunks:
                answers[chunk.request_id][chunk.choice].add(chunk)
        body = await self._body(list(answers.values()), echoes)
        return web.Response(
            body=msgspec.json.encode(body), content_type="application/json", headers=headers
        )

    async def _body(self, groups: list[list[Answer]], echoes: list[Echo | None]) -> dict[str, Any]:
        request = self._request
        assert request is not None
        if self._handles[0].request.params.logprobs is not None:
            for echo, handle, group in zip(echoes, self._handles, groups, strict=True):
                if echo is not None:
                    await add_logprobs(echo, self._client, handle, group[0].prompt_rows())
        choices = [
            answer.choice(self._form, echo)
            for echo, group in zip(echoes, groups, strict=True)
            for answer in group
        ]
        usage = usage_of(self._handles)
        prompt_only = isinstance(request, CompletionRequest) and request.prompt_only
        if prompt_only:
            usage.completion_tokens, usage.total_tokens = 0, usage.prompt_tokens
        body = self._envelope(OBJECTS[self._form], choices, usage=usage)
        if request.prompt_logprobs is not None:
            add_prompt_logprobs(body, groups, self._form)
        if request.return_token_ids:
            add_token_ids(body, self._handles, groups, self._form, prompt_only)
        return body

    async def _echoes(self) -> list[Echo | None]:
        """By prompt, what its texts begin with."""
        request = self._request
        if not isinstance(request, CompletionRequest) or not request.echo:
            return [None] * len(self._prompts)
        return [
            await echo_of(self._client, prompt, request.prompt_only) for prompt in self._prompts
        ]

    async def stream(
        self,
        request: web.Request,
        include_usage: bool,
        headers: dict[str, str],
        writes: WriteBatch,
    ) -> web.StreamResponse:
        """The events as they come. Raises errors before the first; a later one is the last.

        writes: what all streams of this event loop share.
        """
        echoes = await self._echoes()
        chunks = await self._mailbox.take()
        stream = EventStream(headers, writes)
        await stream.open(request)
        take, write = self._mailbox.take, stream.write
        try:
            if echo_events := self._echo_events(echoes):
                await write(echo_events)
            self._mailbox.taker = lambda chunk: not chunk.data or stream.offer(chunk.data)
            while chunks:
                # What has piled up behind a slow connection leaves in one write.
                if data := b"".join([chunk.data for chunk in chunks]):
                    await write(data)
                chunks = await take()
            last = (self._usage_event() if include_usage else b"") + _DONE
        except RingcastError as error:
            last = event_of(error)
        await stream.end(last)
        return stream.response

    def _echo_events(self, echoes: list[Echo | None]) -> bytes:
        """The first event of each choice."""
        pairs = zip(self._handles, echoes, strict=True)
        return b"".join(
            [
                self._echo_event(handle, echo, choice)
                for handle, echo in pairs
                if echo is not None
                for choice in range(handle.request.params.n)
            ]
        )

    def _echo_event(self, handle: RequestHandle, echo: Echo, choice: int) -> bytes:
        output, num_tokens = handle.request.output, len(handle.prompt_token_ids) // 4
        said = {
            "index": output.index_offset + choice,
            "text": echo.text,
            "logprobs": None,
            "finish_reason": None,
        }
        body = self._envelope(CHUNK_OBJECTS[self._form], [said], None)
        if output.continuous_usage:
            body["usage"] = EventUsage(num_tokens, 0, num_tokens)
        elif not output.null_usage:
            del body["usage"]
        return b"data: %b\n\n" % msgspec.json.encode(body)

    def _usage_event(self) -> bytes:
        body = self._envelope(CHUNK_OBJECTS[self._form], [], usage=usage_of(self._handles))
        return b"data: %b\n\n" % msgspec.json.encode(body)

    def _envelope(
        self, kind: str, choices: list[dict[str, Any]], usage: Usage | EventUsage | None
    ) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._model,
            "choices": choices,
            "usage": usage,
        }

    def _check_room(self, count: int) -> None:
        limit = self._client.max_num_queued_reqs
        if count > limit:
            raise InvalidRequestError(
                f"prompt has {count} prompts; this server holds {limit} requests at most",
                param="prompt",
            )
        if count > self._client.room > 0:
            raise OverloadedError(
                f"there is room for {self._client.room} more requests, not {count}"
            )
