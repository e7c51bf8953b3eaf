"""`AsyncLLM`: a model in an engine of this process's own, for asyncio programs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable
from types import TracebackType
from typing import Any

from ..actors.connection import EngineConnection
from ..mq.config import DEFAULT_MODEL, EngineConfig, ModelSpec, build
from ..mq.errors import ConfigError, EngineDeadError, InvalidRequestError
from ..mq.messages import OutputSpec
from ..mq.sampling_params import RequestOutputKind, SamplingParams
from ..mq.supervision import Progress, Status
from .client import EngineClient
from .embedding import EmbeddingRequestOutput, embed
from .handle import RequestHandle
from .hub import resolve_model
from .outputs import RequestBuilder, RequestOutput
from .prompts import ReadPrompt, UserPrompt, chat_prompt, read_prompt

OnProgress = Callable[[str, str, int, int], None]
_CLOSE_SECONDS = 10.0


class AsyncLLM:
    """Starts its engine on first use or at `async with`. Use it on one event loop; shut it down.

    model, options: as in `EngineConfig`, by name. Raises ConfigError for what can't work.
    on_progress: called with (who, what, done, total) while the engine starts.
    """

    def __init__(
        self, model: str = DEFAULT_MODEL, *, on_progress: OnProgress | None = None, **options: Any
    ) -> None:
        self.config = build(EngineConfig, {"model": model, **options})
        if self.config.shutdown_timeout != EngineConfig().shutdown_timeout:
            raise ConfigError(
                f"shutdown_timeout = {self.config.shutdown_timeout}: it is for servers; "
                "an engine of a program's own ends as soon as it is told to"
            )
        self._on_progress = on_progress or _quiet
        self._spec: ModelSpec | None = None
        self._starting: asyncio.Task[None] | None = None
        self._connection: EngineConnection | None = None
        self._client: EngineClient | None = None
        self._named: dict[str, RequestHandle] = {}
        self._closed = False

    def resolve(self) -> ModelSpec:
        """Find the model's files, fetching them if need be. Blocks; `start` does it on a thread."""
        if self._spec is None:
            self._spec = resolve_model(self.config, self._found)
        return self._spec

    async def start(self) -> None:
        """Find the model and start the engine, until it is ready.

        Raises ConfigError, EngineDeadError.
        """
        if self._closed:
            raise EngineDeadError("this engine has been shut down")
        if self._starting is None:
            self._starting = asyncio.create_task(self._start())
        await asyncio.shield(self._starting)

    @property
    def client(self) -> EngineClient:
        """The ledger of this engine's requests, once it has started."""
        assert self._client is not None, "the engine has not been started"
        return self._client

    @property
    def spec(self) -> ModelSpec:
        return self.client.spec

    @property
    def details(self) -> dict[str, str | int | float]:
        """What the engine's workers say about themselves."""
        return self._connected.details

    @property
    def _connected(self) -> EngineConnection:
        assert self._connection is not None, "the engine has not been started"
        return self._connection

    def get_default_sampling_params(self) -> SamplingParams:
        """What the model's generation_config.json asks for, ours where it says nothing."""
        return SamplingParams(**self.spec.sampling_defaults)

    def generate(
        self,
        prompt: UserPrompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
    ) -> AsyncGenerator[RequestOutput, None]:
        """The output so far, each time there is more; or what `sampling_params.output_kind` says.

        priority: the lower, the more urgent; for engines with scheduling_policy="priority".
        Leaving the loop early aborts the request.

        Raises InvalidRequestError, RequestFailedError, OverloadedError, EngineDeadError.
        """

        def read() -> ReadPrompt:
            return read_prompt(prompt, self.spec.vocab_size)

        return self._outputs(read, sampling_params, request_id, priority)

    def chat(
        self,
        messages: list[dict[str, Any]],
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        priority: int = 0,
    ) -> AsyncGenerator[RequestOutput, None]:
        """As `generate`, for a conversation."""

        def read() -> ReadPrompt:
            prompt = chat_prompt(
                messages,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                chat_template=chat_template,
                template_kwargs=chat_template_kwargs,
            )
            return ReadPrompt(prompt)

        return self._outputs(read, sampling_params, request_id, priority)

    async def embed(
        self, prompt: UserPrompt, request_id: str | None = None, *, priority: int = 0
    ) -> EmbeddingRequestOutput:
        """The embedding of a prompt, by an embedding model. Cancelling it aborts the request.

        Raises as `generate` does.
        """
        await self.start()
        asked = read_prompt(prompt, self.spec.vocab_size)
        (embedded,) = await embed(self.client, [asked.prompt], [priority])
        return embedded.output(asked.text, request_id)

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """End requests by the ids given to `generate`: each yields what it has, as aborted.

        An id that has ended already, or never was, is no error.
        """
        for name in [request_id] if isinstance(request_id, str) else request_id:
            if (handle := self._named.get(name)) is not None:
                handle.abort()

    async def reset_prefix_cache(self) -> bool:
        """Forget all KV blocks computed so far: no request sent after this finds any of them.

        Requests that run go on. Always True, as no block's use stands in the way.
        Raises EngineDeadError.
        """
        await self.start()
        return await self.client.reset_prefix_cache()

    async def start_profile(self) -> None:
        """Let the workers record what they do, until `stop_profile`; with torch_profiler_dir.

        Raises InvalidRequestError where that isn't set or they record already, EngineDeadError.
        """
        await self.start()
        await self._connected.profile(True)

    async def stop_profile(self) -> str:
        """End the recording. Returns where its traces are, and a table of each: how long the device
        was idle, and which kernels took its time.

        Raises InvalidRequestError if nothing is recorded, RequestFailedError if it can't be
        written, EngineDeadError.
        """
        await self.start()
        return await self._connected.profile(False)

    async def status(self) -> Status:
        """The engine's processes, channels and statistics, as they are now."""
        return await self._connected.status()

    async def shutdown(self) -> None:
        """End the engine and every request in it. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if self._starting is not None:
            self._starting.cancel()
            await asyncio.gather(self._starting, return_exceptions=True)
        if self._client is not None:
            self._client.fail_all(EngineDeadError("this engine has been shut down"))
        if self._connection is not None:
            await self._connection.close(_CLOSE_SECONDS)

    async def __aenter__(self) -> AsyncLLM:
        try:
            await self.start()
        except BaseException:
            await self.shutdown()
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.shutdown()

    async def _start(self) -> None:
        config = self.config
        spec = self._spec
        if spec is None:
            spec = await asyncio.to_thread(self.resolve)
        connection = await EngineConnection.launch(config, spec, self._progressed)
        client = EngineClient(
            spec,
            connection.send,
            0,
            config.max_num_queued_reqs,
            config.seed,
            config.scheduling_policy,
            config.data_parallel_size,
            config.data_parallel_routing,
            num_tokenizers=config.tokenizer_count,
            num_detokenizers=config.detokenizer_count,
            takes_extra_args=bool(config.logits_processors),
        )
        connection.attach(
            client.deliver,
            client.fail_all,
            lambda message: client.lost(message.lost, message.error, message.from_outside),
            client.regained,
        )
        self._connection, self._client = connection, client

    def _found(self, what: str, done: int, total: int) -> None:
        self._on_progress("model", what, done, total)

    def _progressed(self, actor: str, progress: Progress) -> None:
        self._on_progress(actor, progress.what, progress.done, progress.total)

    async def _outputs(
        self,
        read: Callable[[], ReadPrompt],
        params: SamplingParams | None,
        request_id: str | None,
        priority: int,
    ) -> AsyncGenerator[RequestOutput, None]:
        await self.start()
        asked = read()
        if request_id in self._named:
            raise InvalidRequestError(
                f"request_id {request_id!r} is in use by a request that runs", param="request_id"
            )
        params = params or self.get_default_sampling_params()
        kind = params.output_kind
        once = kind is RequestOutputKind.FINAL_ONLY
        output = OutputSpec(client=self.client.index, delta=not once)
        with self.client.submit(asked.prompt, params, output, priority=priority) as handle:
            name = request_id or handle.request_id
            self._named[name] = handle
            builder = RequestBuilder(handle, asked.text, name)
            try:
                while chunks := await handle.mailbox.take():
                    for chunk in chunks:
                        builder.add(chunk)
                    if kind is RequestOutputKind.DELTA:
                        yield builder.take()
                    elif builder.finished or not once:
                        yield builder.output()
            finally:
                del self._named[name]


def _quiet(who: str, what: str, done: int, total: int) -> None:
    pass
