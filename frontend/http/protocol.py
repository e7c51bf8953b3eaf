"""What clients may send to /v1/completions and /v1/chat/completions, and what becomes of it.

A body goes through three sieves. Null is as good as absent. Fields in IGNORED say nothing about
the output and are dropped. Fields in UNSUPPORTED would change the output and can't yet: they may
have their neutral value, and anything else is refused by name. What is left must be a field of the
request's struct, of its type. (A field that one of the structs has is not unsupported there.)
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from ...actors.text.event_renderer import REASONING_NAMES
from ...actors.text.parsers.output_parser import takes_types
from ...mq.config import ModelSpec
from ...mq.errors import InvalidRequestError
from ...mq.messages import ChatPrompt, ParserSpec, Prompt
from ...mq.sampling_params import MAX_LOGPROBS, SamplingParams
from ...mq.server_config import ServerConfig
from ..prompts import chat_prompt, text_prompt, tokens_prompt
from .tool_types import parameter_types
from .tools import check_tool_choice, check_tools, tool_parser

IGNORED = frozenset(
    {
        "metadata",
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
    }
)

# Field: the values that ask for nothing.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "add_special_tokens": (False,),
    "audio": (),
    "best_of": (1,),
    "chat_template": (),
    "documents": ([],),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "include_reasoning": (True,),
    "length_penalty": (1, 1.0),
    "modalities": (["text"],),
    "prediction": (),
    "reasoning_effort": (),
    "response_format": ({"type": "text"},),
    "spaces_between_special_tokens": (True,),
    "structured_outputs": (),
    "suffix": ("",),
    "use_beam_search": (False,),
    "verbosity": (),
    "web_search_options": (),
}

_GUIDED = "it needs guided decoding, which this server doesn't have yet"
_REASONS = {
    "add_special_tokens": "the chat template writes them",
    "chat_template": "templates in requests are not run; the server's is set by --chat-template",
    "guided_choice": _GUIDED,
    "guided_grammar": _GUIDED,
    "guided_json": _GUIDED,
    "guided_regex": _GUIDED,
    "response_format": f'{_GUIDED}; it can only be absent or {{"type":"text"}}',
    "structured_outputs": _GUIDED,
    "suffix": "it needs a model that fills in between two texts, and a way to ask it",
    "use_beam_search": "LLM.beam_search in Python searches beams; over HTTP there is sampling only",
}


class StreamOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: bool = (
        False  # OpenAI's clients may send it; there is nothing here to obfuscate
    )


class GenerationRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What both APIs have. None is "not said": see `sampling_params`."""

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    prompt_logprobs: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    skip_special_tokens: bool | None = None
    cache_salt: str = ""
    priority: int = 0
    truncate_prompt_tokens: int | None = None
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    vllm_xargs: dict[str, Any] | None = None

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def continuous_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.continuous_usage_stats

    @property
    def output_limit(self) -> int | None:
        """The most tokens of output that the request speaks of."""
        return self.max_tokens

    def keep_prompt_tokens(self, spec: ModelSpec) -> int:
        """How many of the prompt's last tokens count; 0 is all. Raises InvalidRequestError."""
        room_for_output = max(self.output_limit or 1, 1)
        return kept_prompt_tokens(self.truncate_prompt_tokens, spec, room_for_output)


def kept_prompt_tokens(given: int | None, spec: ModelSpec, output: int) -> int:
    """What truncate_prompt_tokens means: how many of a prompt's last tokens count; 0 is all. -1 is
    as many as leave room for so many of output. Raises InvalidRequestError.
    """
    if given is None:
        return 0
    if given == -1:
        return max(spec.max_model_len - output, 1)
    if not 1 <= given <= spec.max_model_len:
        raise InvalidRequestError(
            f"truncate_prompt_tokens must be -1 or from 1 to {spec.max_model_len}, got {given}",
            param="truncate_prompt_tokens",
        )
    return given


class CompletionRequest(GenerationRequest, kw_only=True, forbid_unknown_fields=True):
    prompt: str | list[Any]
    logprobs: int | None = None
    add_special_tokens: bool = True
    echo: bool = False
    best_of: int | None = None

    @property
    def prompt_only(self) -> bool:
        """Nothing is to be generated; the prompt and its log-probabilities are the answer."""
        return self.echo and self.max_tokens == 0

    def prompts(self, vocab_size: int) -> list[Prompt]:
        """One or several prompts, of text or token ids."""
        given = self.prompt
        if isinstance(given, str):
            return [text_prompt(given, self.add_special_tokens)]
        if not given:
            raise InvalidRequestError("prompt must not be an empty list", param="prompt")
        kinds = {type(item) for item in given}
        if kinds == {int}:
            return [tokens_prompt(given, vocab_size, "prompt")]
        if kinds == {str}:
            return [text_prompt(text, self.add_special_tokens) for text in given]
        if kinds == {list}:
            return [tokens_prompt(ids, vocab_size, f"prompt[{i}]") for i, ids in enumerate(given)]
        raise InvalidRequestError(
            "prompt must be a string, a list of strings, a list of token ids, or a list of lists "
            "of token ids",
            param="prompt",
        )


class ChatRequest(GenerationRequest, kw_only=True, forbid_unknown_fields=True):
    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[Any] = []
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool = True

    @property
    def output_limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def chat_prompt(self) -> ChatPrompt:
        say_next = self.add_generation_prompt
        prompt = chat_prompt(
            [_with_reasoning(message) for message in self.messages],
            add_generation_prompt=not self.continue_final_message if say_next is None else say_next,
            continue_final_message=self.continue_final_message,
            template_kwargs=self.chat_template_kwargs,
        )
        if self.tools:
            prompt = msgspec.structs.replace(prompt, tools=msgspec.json.encode(self.tools))
        return prompt

    def parsers(self, server: ServerConfig) -> ParserSpec | None:
        """What is to be found in the output. Raises InvalidRequestError where that can't be."""
        tools = tool_parser(self.tools, self.tool_choice, server)
        if not tools and server.reasoning_parser is None:
            return None
        return ParserSpec(
            tools,
            server.reasoning_parser or "",
            parallel=self.parallel_tool_calls,
            types=parameter_types(self.tools) if takes_types(tools) else {},
        )


R = TypeVar("R", CompletionRequest, ChatRequest)
S = TypeVar("S", bound=msgspec.Struct)


def read_request(body: bytes, kind: type[R]) -> R:
    """A body as a request. Raises InvalidRequestError that names the field at fault."""
    request = sift(body, kind)
    _check_together(request)
    return request


def sift(
    body: bytes,
    kind: type[S],
    unsupported: Mapping[str, tuple[Any, ...]] = UNSUPPORTED,
    reasons: Mapping[str, str] = _REASONS,
) -> S:
    """A body as a struct, through the three sieves. Raises InvalidRequestError, likewise."""
    own = kind.__struct_fields__
    fields = read_fields(body, own)
    for name in fields.keys() & unsupported.keys() - {*own}:
        _check_neutral(name, fields.pop(name), unsupported[name], reasons)
    if isinstance(options := fields.get("stream_options"), dict):
        fields["stream_options"] = {k: v for k, v in options.items() if v is not None}
    try:
        return msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        raise invalid_field(error) from None


def read_fields(body: bytes, own: Collection[str] = ()) -> dict[str, Any]:
    """The fields of a body that say something: neither null nor in IGNORED, or a struct's own."""
    try:
        fields = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidRequestError(f"the body is not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise InvalidRequestError("the body must be a JSON object")
    return {
        name: value
        for name, value in fields.items()
        if value is not None and (name not in IGNORED or name in own)
    }


def sampling_params(request: CompletionRequest | ChatRequest, spec: ModelSpec) -> SamplingParams:
    """What the request says, else the model's own defaults, else OpenAI's."""
    try:
        return SamplingParams(**_params_fields(request, spec))
    except InvalidRequestError as error:
        if error.param != "extra_args":
            raise
        reason = str(error).replace("extra_args", "vllm_xargs", 1)
        raise InvalidRequestError(reason, param="vllm_xargs") from None


def _params_fields(request: CompletionRequest | ChatRequest, spec: ModelSpec) -> dict[str, Any]:
    chat = isinstance(request, ChatRequest)
    fields: dict[str, Any] = {"max_tokens": None if chat else 16, **spec.sampling_defaults}
    for name in _SAMPLING_FIELDS:
        if (value := getattr(request, name)) is not None:
            fields[name] = value
    if request.logit_bias is not None:
        fields["logit_bias"] = _by_token_id(request.logit_bias)
    if request.vllm_xargs is not None:
        fields["extra_args"] = request.vllm_xargs
    if isinstance(request, CompletionRequest):
        fields["logprobs"] = request.logprobs
        if request.echo and request.logprobs is not None:
            fields["prompt_logprobs"] = request.logprobs
        if request.prompt_only:
            fields["max_tokens"] = 1  # the least that the engine computes; it is dropped
        return fields
    fields["logprobs"] = _chat_logprobs(request)
    if (limit := request.max_completion_tokens) is not None:
        if limit < 1:
            raise InvalidRequestError(
                f"max_completion_tokens must be an integer of at least 1, got {limit}",
                param="max_completion_tokens",
            )
        fields["max_tokens"] = limit
    return fields


_SAMPLING_FIELDS = tuple(
    field
    for field in GenerationRequest.__struct_fields__
    if field in SamplingParams.__struct_fields__
)


def _by_token_id(biases: dict[str, float]) -> dict[int, float]:
    """JSON's keys are strings."""
    for key in biases:
        if not (key.isascii() and key.isdecimal() and len(key) < 11):
            raise InvalidRequestError(
                f"logit_bias must be numbers by token id, got the key {key[:80]!r}",
                param="logit_bias",
            )
    return {int(key): bias for key, bias in biases.items()}


def _chat_logprobs(request: ChatRequest) -> int | None:
    top = request.top_logprobs
    if top is not None and not 0 <= top <= MAX_LOGPROBS:
        raise InvalidRequestError(
            f"top_logprobs must be an integer from 0 to {MAX_LOGPROBS}, got {top}",
            param="top_logprobs",
        )
    if not request.logprobs:
        if top:
            raise InvalidRequestError(
                "top_logprobs needs logprobs to be true", param="top_logprobs"
            )
        return None
    return top or 0


def _check_neutral(
    name: str, value: Any, accepted: tuple[Any, ...], reasons: Mapping[str, str]
) -> None:
    value = _without_nulls(value)
    # True == 1 and False == 0, but a boolean is no number here.
    if any(value == neutral and _alike(value, neutral) for neutral in accepted):
        return
    reason = reasons.get(name, f"it can only be {_neutral(accepted)}")
    raise InvalidRequestError(f"{name} is not supported yet: {reason}", param=name)


def _without_nulls(value: Any) -> Any:
    """Null is as good as absent in an object, too."""
    if isinstance(value, dict):
        return {name: _without_nulls(v) for name, v in value.items() if v is not None}
    return value


def _alike(value: Any, neutral: Any) -> bool:
    return isinstance(value, bool) == isinstance(neutral, bool)


def _neutral(accepted: tuple[Any, ...]) -> str:
    values: Sequence[Any] = ["absent", *accepted[:1]]
    return " or ".join(v if v == "absent" else msgspec.json.encode(v).decode() for v in values)


def _check_together(request: CompletionRequest | ChatRequest) -> None:
    if request.stream_options is not None and not request.stream:
        raise InvalidRequestError("stream_options needs stream to be true", param="stream_options")
    if request.prompt_logprobs is not None and request.stream:
        raise InvalidRequestError(
            "prompt_logprobs can't be streamed: stream must be false", param="prompt_logprobs"
        )
    if request.return_token_ids and request.stream:
        raise InvalidRequestError(
            "return_token_ids can't be streamed: stream must be false", param="return_token_ids"
        )
    if request.continuous_usage and not request.include_usage:
        raise InvalidRequestError(
            "stream_options.continuous_usage_stats needs stream_options.include_usage to be true",
            param="stream_options.continuous_usage_stats",
        )
    if isinstance(request, CompletionRequest):
        _check_best_of(request)
        if request.echo:
            _check_echo(request)
    if isinstance(request, ChatRequest):
        check_tools(request.tools)
        check_tool_choice(request.tools, request.tool_choice)
        limits = {request.max_tokens, request.max_completion_tokens} - {None}
        if len(limits) > 1:
            raise InvalidRequestError(
                f"max_tokens ({request.max_tokens}) and max_completion_tokens "
                f"({request.max_completion_tokens}) contradict each other",
                param="max_completion_tokens",
            )


def _check_best_of(request: CompletionRequest) -> None:
    n = 1 if request.n is None else request.n
    if request.best_of not in (None, 1, n):
        raise InvalidRequestError(
            f"best_of is not supported yet: it can only be absent, 1 or equal to n ({n})",
            param="best_of",
        )


def _check_echo(request: CompletionRequest) -> None:
    if request.stream and (request.logprobs is not None or request.prompt_only):
        other = "max_tokens 0" if request.logprobs is None else "logprobs"
        raise InvalidRequestError(
            f"echo with {other} can't be streamed: stream must be false", param="echo"
        )
    if request.truncate_prompt_tokens is not None:
        raise InvalidRequestError(
            "echo can't be combined with truncate_prompt_tokens", param="echo"
        )
    asked = request.prompt_logprobs
    if asked is not None and request.logprobs is not None and asked != request.logprobs:
        raise InvalidRequestError(
            f"prompt_logprobs ({asked}) and logprobs ({request.logprobs}) must be equal where the "
            "prompt is echoed with its log-probabilities",
            param="prompt_logprobs",
        )


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """A message with its reasoning by each name that templates may read it by."""
    given = [message[name] for name in REASONING_NAMES if message.get(name) is not None]
    missing = [name for name in REASONING_NAMES if message.get(name) is None]
    return message | dict.fromkeys(missing, given[0]) if given else message


def invalid_field(error: msgspec.ValidationError) -> InvalidRequestError:
    """msgspec's "reason - at `$.path`" as an error that names the field."""
    reason, _, path = str(error).partition(" - at `$")
    param = path.rstrip("`").lstrip(".")
    for known in ("unknown field `", "missing required field `"):
        if known in reason:
            name = reason.partition(known)[2].rstrip("`") or '""'  # JSON's empty name
            param = f"{param}.{name}" if param else name
            reason = f"{known.split(' field')[0]} field"
    reason = reason[0].lower() + reason[1:]
    return InvalidRequestError(f"{param}: {reason}" if param else reason, param=param or None)
