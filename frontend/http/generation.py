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
from .errors import event_of
from .protocol import GenerationRequest
from .responses import (
    CHUNK_OBJECTS,
    OBJECTS,
    Answer,
    Form,
    Usage,
    add_prompt_logprobs,
    usage_of,
)

_ID_PREFIX = {"chat": "chatcmpl-", "completion": "cmpl-"}
_DONE = b"data: [DONE]\n\n"
_STREAM_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}


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
            )
            handle = self._client.submit(
                prompt,
                params,
                output,
                cache_salt=request.cache_salt,
                mailbox=self._mailbox,
                priority=request.priority,
            )
            self._handles.append(handle)

    async def answer(self, headers: dict[str, str]) -> web.Response:
        """Everything at once. Raises whatever any of the requests ended with."""
        answers = {
            handle.request_id: [Answer(handle, choice) for choice in range(handle.request.params.n)]
            for handle in self._handles
        }
        while chunks := await self._mailbox.take():
            for chunk in chunks:
                answers[chunk.request_id][chunk.choice].add(chunk)
        choices = [answer.choice(self._form) for group in answers.values() for answer in group]
        body = self._envelope(OBJECTS[self._form], choices, usage=usage_of(self._handles))
        if self._handles[0].request.params.prompt_logprobs is not None:
            add_prompt_logprobs(body, list(answers.values()), self._form)
        return web.Response(
            body=msgspec.json.encode(body), content_type="application/json", headers=headers
        )

    async def stream(
        self, request: web.Request, include_usage: bool, headers: dict[str, str]
    ) -> web.StreamResponse:
        """The events as they come. Raises errors before the first; a later one is the last."""
        chunks = await self._mailbox.take()
        response = web.StreamResponse(headers={**_STREAM_HEADERS, **headers})
        await response.prepare(request)
        take, write = self._mailbox.take, response.write
        try:
            while chunks:
                # What has piled up behind a slow connection leaves in one write.
                if data := b"".join([chunk.data for chunk in chunks]):
                    await write(data)
                chunks = await take()
            await write((self._usage_event() if include_usage else b"") + _DONE)
        except RingcastError as error:
            await write(event_of(error))
        await response.write_eof()
        return response

    def _usage_event(self) -> bytes:
        body = self._envelope(CHUNK_OBJECTS[self._form], [], usage=usage_of(self._handles))
        return b"data: %b\n\n" % msgspec.json.encode(body)

    def _envelope(self, kind: str, choices: list[dict[str, Any]], usage: Usage) -> dict[str, Any]:
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
