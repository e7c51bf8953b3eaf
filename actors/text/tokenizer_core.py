"""The tokenizer's core: a prompt becomes token ids that fit the model, or its request is refused.

Each Generate goes on as an AddRequest to the scheduler, which the client is told by an Accepted, or
is answered by a Rejected. A takeover is encoded anew, or brings the token ids of before; its output
so far goes on as it is. What must not overtake a request takes the same way: an Abort becomes an
AbortRequest, the loss of a client an AbortClient to every scheduler, and a Ping or a
ResetPrefixCache stays what it is. The scheduler is that of the replica which the client names. A
Tokenize or Detokenize is answered here.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any

import msgspec
import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from ...mq import codec
from ...mq.config import ModelSpec
from ...mq.errors import ConfigError, InvalidRequestError
from ...mq.messages import (
    Abort,
    AbortClient,
    AbortRequest,
    Accepted,
    AddRequest,
    ChatPrompt,
    Detokenize,
    Detokenized,
    ErrorInfo,
    Generate,
    OutputSpec,
    Ping,
    Prompt,
    Rejected,
    ResetPrefixCache,
    TextPrompt,
    Tokenize,
    Tokenized,
    TokensPrompt,
)
from ...mq.sampling_params import SamplingParams
from ..core import PeerAdded, PeerLost, Send
from .chat_messages import parse_messages
from .chat_template import ChatTemplates
from .parsers.output_parser import opener_of
from .text_tokenizer import TextTokenizer
from .token_options import check_token_ids, tokenise_bad_words

logger = logging.getLogger(__name__)

# A text is first measured by its beginning: this many characters for each token of context are more
# than a model can take of any usual text, and cost little where all of a 4 MB prompt costs seconds.
# Near the cut the beginning may be split otherwise than the whole, by fewer tokens than the slack.
_PROBE_CHARS_PER_TOKEN = 16
_PROBE_SLACK = 64
# The mark that opens the reasoning, and blanks after it, are in so many tokens at a prompt's end.
_OPENER_TOKENS = 16
_OWN_VARIABLES = ("messages", "add_generation_prompt", "continue_final_message", "chat_template")


class TokenizerCore:
    """See actors/core.py. `clock` is what templates that write today's date look at.

    tokenizer: None where the engine has none (skip_tokenizer_init); then prompts must be token ids,
    and what needs text is refused. num_engines: replicas behind it at
    first; those that were removed count on, for nobody hears what is sent there.
    """

    def __init__(
        self,
        spec: ModelSpec,
        tokenizer: TextTokenizer | None,
        num_engines: int = 1,
        clock: Callable[[], datetime] = datetime.now,
    ) -> None:
        self._spec = spec
        self._tokenizer = tokenizer
        self._num_engines = num_engines
        self._templates = ChatTemplates(clock)
        self._generates = spec.pooling is None
        self._longest_prompt = spec.max_model_len - self._generates
        self._num_requests = 0
        self._num_rejected = 0
        self._num_prompt_tokens = 0
        if spec.chat_template is not None:
            try:
                self._templates.get(spec.chat_template)
            except InvalidRequestError as error:
                raise ConfigError(f"chat_template: {error}") from error

    def handle(self, source: str, message: Any, now: float) -> Sequence[Send]:
        if isinstance(message, Generate):
            return self._generate(message)
        if isinstance(message, Tokenize | Detokenize):
            return (Send(f"client.{message.client}", self._answer(message)),)
        if isinstance(message, Abort):
            request = AbortRequest(message.request_id, message.incarnation)
            return (Send(_scheduler(message.engine), request),)
        if isinstance(message, PeerLost):
            return self._lose(source)
        if isinstance(message, PeerAdded):
            return self._add_peer(source)
        assert isinstance(message, Ping | ResetPrefixCache), f"{source} sent {message!r}"
        return (Send(_scheduler(message.engine), message),)

    def flush(self, now: float) -> Sequence[Send]:
        return ()

    def statistics(self) -> dict[str, float]:
        return {
            "requests": self._num_requests,
            "rejected": self._num_rejected,
            "prompt_tokens": self._num_prompt_tokens,
        }

    def _lose(self, peer: str) -> Sequence[Send]:
        kind, _, number = peer.partition(".")
        if kind != "client":
            return ()
        abort = AbortClient(int(number))
        return [Send(_scheduler(engine), abort) for engine in range(self._num_engines)]

    def _add_peer(self, peer: str) -> Sequence[Send]:
        kind, _, number = peer.partition(".")
        if kind == "scheduler":
            self._num_engines = max(self._num_engines, int(number) + 1)
        return ()

    def _generate(self, request: Generate) -> Sequence[Send]:
        self._num_requests += 1
        client = f"client.{request.output.client}"
        try:
            add = self._add(request)
            ids = add.prompt_token_ids
            accepted = Accepted(request.request_id, request.incarnation, ids)
            return (Send(client, accepted), Send(_scheduler(request.engine), add))
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a panic in the Rust library is no Exception
            info = _error_info(error, request.request_id)
        self._num_rejected += 1
        rejected = Rejected(request.request_id, request.incarnation, info)
        return (Send(client, rejected),)

    def _answer(self, question: Tokenize | Detokenize) -> Tokenized | Detokenized | Rejected:
        name = question.request_id
        try:
            if isinstance(question, Detokenize):
                return Detokenized(name, self._decode(codec.ints(question.token_ids)))
            ids = self._encode(question.prompt)
            self._check_range(ids, _param(question.prompt))
            texts = []
            if question.with_texts:
                tokenizer = self._text_tokenizer("return_token_strs")
                texts = [tokenizer.token_name(token_id) for token_id in ids.tolist()]
            return Tokenized(name, codec.pack(ids), texts)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # as in _generate
            return Rejected(name, 0, _error_info(error, name))

    def _decode(self, ids: NDArray[Any]) -> str:
        tokenizer = self._text_tokenizer("tokens")
        self._check_range(ids, "tokens")
        return tokenizer.decode(ids.tolist(), skip_special_tokens=False)

    def _add(self, request: Generate) -> AddRequest:
        vocab_size = self._spec.vocab_size
        check_token_ids(request.params, vocab_size)
        bad_words = self._tokenise_bad_words(request.params)
        ids = self._encode(request.prompt, request.keep_prompt_tokens)
        param = _param(request.prompt)
        if not ids.size:
            raise InvalidRequestError("the prompt is empty: it must have at least one token", param)
        if ids.size > self._longest_prompt:
            raise self._too_long(str(ids.size), param)
        self._check_range(ids, param)
        output = self._output(request.output, ids)
        self._num_prompt_tokens += ids.size
        return AddRequest(
            request_id=request.request_id,
            incarnation=request.incarnation,
            prompt_token_ids=codec.pack(ids),
            params=self._fit(request.params, int(ids.size)) if self._generates else request.params,
            output=output,
            arrival=request.arrival,
            cache_salt=request.cache_salt,
            bad_words=bad_words,
            resume=request.resume,
            priority=request.priority,
            detokenizer=request.detokenizer,
        )

    def _output(self, output: OutputSpec, ids: NDArray[Any]) -> OutputSpec:
        """The spec, which says whether the prompt ends within the model's reasoning."""
        parsers = output.parsers
        if parsers is None or self._tokenizer is None or not (opener := opener_of(parsers)):
            return output
        end = self._tokenizer.decode(ids[-_OPENER_TOKENS:].tolist(), skip_special_tokens=False)
        thinking = end.rstrip().endswith(opener)
        return replace(output, parsers=replace(parsers, thinking=thinking))

    def _encode(self, prompt: Prompt, keep: int = 0) -> NDArray[Any]:
        """keep: the last tokens alone, so many of them; 0 is all."""
        if isinstance(prompt, TokensPrompt):
            return codec.ints(prompt.token_ids)[-keep:]
        if isinstance(prompt, TextPrompt):
            text, add_special_tokens = prompt.text, prompt.add_special_tokens
        else:
            # A template writes the special tokens itself.
            text, add_special_tokens = self._render(prompt), False
        if not text:
            raise InvalidRequestError("the prompt is empty", _param(prompt))
        tokenizer = self._text_tokenizer(_param(prompt))
        if keep:
            end = self._last_chars(tokenizer, text, keep)
            return np.array(tokenizer.encode_end(end, keep, add_special_tokens), dtype=np.int64)
        self._probe(tokenizer, text, _param(prompt))
        return np.array(tokenizer.encode(text, add_special_tokens), dtype=np.int64)

    def _tokenise_bad_words(self, params: SamplingParams) -> list[bytes]:
        if params.stop:
            self._text_tokenizer("stop")  # without one there is no text to find them in
        if not params.bad_words:
            return []
        tokenizer = self._text_tokenizer("bad_words")
        return tokenise_bad_words(params.bad_words, tokenizer, self._spec.vocab_size)

    def _text_tokenizer(self, param: str) -> TextTokenizer:
        """Raises InvalidRequestError, for the field that needs one, where there is none."""
        if self._tokenizer is None:
            raise InvalidRequestError(
                f"{param} needs a tokenizer, and this engine has none (skip_tokenizer_init): "
                "prompts must be token ids, and what speaks of text is refused",
                param,
            )
        return self._tokenizer

    def _probe(self, tokenizer: TextTokenizer, text: str, param: str) -> None:
        beginning = text[: self._spec.max_model_len * _PROBE_CHARS_PER_TOKEN]
        if len(beginning) == len(text):
            return
        least = len(tokenizer.encode(beginning, add_special_tokens=False)) - _PROBE_SLACK
        if least >= self._spec.max_model_len:
            raise self._too_long(f"more than {least}", param)

    def _last_chars(self, tokenizer: TextTokenizer, text: str, keep: int) -> str:
        """An end of the text that has its last `keep` tokens; all of it where that isn't sure."""
        end = text[-(keep + _PROBE_SLACK) * _PROBE_CHARS_PER_TOKEN :]
        is_enough = len(tokenizer.encode(end, add_special_tokens=False)) >= keep + _PROBE_SLACK
        return end if is_enough else text

    def _render(self, prompt: ChatPrompt) -> str:
        tokenizer = self._text_tokenizer("messages")
        variables = self._variables(prompt, tokenizer)
        source = prompt.chat_template
        if source is None:
            source = self._spec.chat_template
        if source is None:
            source = tokenizer.template_for(tools=bool(variables["tools"]))
        if source is None:
            raise InvalidRequestError(
                f"the model {self._spec.name!r} has no chat template: give one with "
                "--chat-template, or use /v1/completions",
                "messages",
            )
        messages = parse_messages(prompt.messages)
        template = self._templates.get(source)
        return template.render(messages, variables, prompt.continue_final_message)

    def _variables(self, prompt: ChatPrompt, tokenizer: TextTokenizer) -> dict[str, Any]:
        if prompt.add_generation_prompt and prompt.continue_final_message:
            raise InvalidRequestError(
                "continue_final_message can't be combined with add_generation_prompt: the last "
                "message is either continued or answered",
                "continue_final_message",
            )
        given = _json_object(prompt.template_kwargs)
        for name in _OWN_VARIABLES:
            if name in given:
                raise InvalidRequestError(
                    f"chat_template_kwargs can't set {name!r}: it is a field of the request",
                    "chat_template_kwargs",
                )
        common = {
            "tools": msgspec.json.decode(prompt.tools) if prompt.tools else None,
            "documents": None,
            "add_generation_prompt": prompt.add_generation_prompt,
            "continue_final_message": prompt.continue_final_message,
        }
        return tokenizer.special_tokens | common | given

    def _check_range(self, ids: NDArray[Any], param: str) -> None:
        wrong = np.flatnonzero((ids < 0) | (ids >= self._spec.vocab_size))
        if wrong.size:
            place = int(wrong[0])
            raise InvalidRequestError(
                f"token id {ids[place]} at place {place} of the prompt is out of range: the "
                f"model's vocabulary has {self._spec.vocab_size} tokens, from 0 up",
                param,
            )

    def _fit(self, params: SamplingParams, num_prompt_tokens: int) -> SamplingParams:
        """The params with a max_tokens that keeps prompt and output within the context."""
        context = self._spec.max_model_len
        room = context - num_prompt_tokens
        if params.max_tokens is not None and params.max_tokens <= room:
            return params
        if params.min_tokens > room:
            raise InvalidRequestError(
                f"min_tokens is {params.min_tokens}, but the model's context of {context} tokens "
                f"leaves room for {room} after a prompt of {num_prompt_tokens}",
                "min_tokens",
            )
        return replace(params, max_tokens=room)

    def _too_long(self, num_tokens: str, param: str) -> InvalidRequestError:
        room = ", one of which at least is for the output" if self._generates else ""
        return InvalidRequestError(
            f"the prompt has {num_tokens} tokens, but the model's context is "
            f"{self._spec.max_model_len} tokens{room}",
            param,
            "context_length_exceeded",
        )


def _scheduler(engine: int) -> str:
    return f"scheduler.{engine}"


def _param(prompt: Prompt) -> str:
    return "messages" if isinstance(prompt, ChatPrompt) else "prompt"


def _error_info(error: BaseException, request_id: str) -> ErrorInfo:
    if isinstance(error, InvalidRequestError):
        return ErrorInfo(str(error), error.status, param=error.param, code=error.code)
    logger.error("request %s failed in the tokenizer", request_id, exc_info=error)
    text = f"the tokenizer failed: {type(error).__name__}: {error}"
    return ErrorInfo(text, status=500, type="server_error")


def _json_object(data: bytes) -> dict[str, Any]:
    try:
        return msgspec.json.decode(data, type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise InvalidRequestError(
            f"chat_template_kwargs must be a JSON object: {error}", "chat_template_kwargs"
        ) from None
