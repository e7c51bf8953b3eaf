"""Everything that actors ever say, and nothing else: read this and know the whole conversation.
(Prompts are in prompt.py, and what scheduler and workers say is in steps.py.)

One request's way, with the edge (actors/topology.py) that carries each message:

    client -> tokenizer       Generate, Abort, Ping, ResetPrefixCache; Tokenize, Detokenize
    tokenizer -> client       Accepted, or Rejected (the request goes no further); Tokenized,
                              Detokenized
    tokenizer -> scheduler    AddRequest, AbortRequest, AbortClient, Ping, ResetPrefixCache (in
                              order: no abort overtakes its request)
    scheduler -> workers      StepPlan (broadcast; only what changed)
    worker -> scheduler       WorkerReady, StepOutput (only the output rank answers a step)
    scheduler -> detokenizer  OpenStream, StreamStep, Ping, ResetPrefixCache
    detokenizer -> scheduler  StopStream (a stop string was found)
    gateway -> scheduler      PeersGone, on another host, in the place of any of its peers; the
                              scheduler answers PeersGoneHeard (actors/master_gateway.py)
    detokenizer -> client     Chunks (the last chunk of a choice carries its Finish), Ping,
                              ResetPrefixCache
    scheduler -> coordinator  Load, where there are several schedulers (data parallelism)
    coordinator -> client     Loads
    scheduler -> coordinator  WantWave, where replicas step together (actors/scheduler/waves.py)
    coordinator -> scheduler  StartWave, AskWave

A *client* is whatever holds the ledger of requests: an API server, or the process that made an
`LLM`. A *choice* is one of the n outputs of a request. A *stream* is one choice inside the engine:
a number that its scheduler gives out. An *incarnation* counts how often a request has been handed
to an engine, so that late results of an older one are recognised and dropped. A *takeover* hands it
over again after a death, with the output that its client has already (`Resume`).

Arrays travel as raw little-endian bytes: see `codec.pack` and `codec.ints`. `i32[N]` below is such
a field. Every time is `time.monotonic()` in seconds (one host, one clock).
"""

from __future__ import annotations

from typing import Literal

from .message import Message as Message
from .prompt import ChatPrompt as ChatPrompt
from .prompt import Prompt as Prompt
from .prompt import TextPrompt as TextPrompt
from .prompt import TokensPrompt as TokensPrompt
from .sampling_params import SamplingParams
from .steps import ExpertLoads as ExpertLoads
from .steps import FullAttentionSpec as FullAttentionSpec
from .steps import KVSpec as KVSpec
from .steps import NewSequence as NewSequence
from .steps import PromptLogprobs as PromptLogprobs
from .steps import SchedulerToWorker as SchedulerToWorker
from .steps import SlidingWindowSpec as SlidingWindowSpec
from .steps import StepOutput as StepOutput
from .steps import StepPlan as StepPlan
from .steps import TokenLogprobs as TokenLogprobs
from .steps import WaveStep as WaveStep
from .steps import WorkerReady as WorkerReady
from .steps import WorkerToScheduler as WorkerToScheduler

FinishReason = Literal["stop", "length", "abort", "error"]


class ErrorInfo(Message):
    """An error as a client may see it: HTTP status, OpenAI error type, and the field at fault."""

    message: str
    status: int = 400
    type: str = "invalid_request_error"
    param: str | None = None
    code: str | None = None


# --- client -> tokenizer ------------------------------------------------------------------------


class ParserSpec(Message):
    """What is to be found in a chat's output: tool calls, reasoning (see actors/text/parsers).

    tools, reasoning: the parsers' names, "" for none.
    thinking: the prompt ends in the mark that opens the reasoning. The tokenizer sees it.
    parallel: false gives the first call only.
    types: by tool and parameter, the JSON types that it may have; for parsers of untyped text.
    """

    tools: str = ""
    reasoning: str = ""
    thinking: bool = False
    parallel: bool = True
    types: dict[str, dict[str, list[str]]] = {}


class OutputSpec(Message):
    """How a request's output is to be rendered by the detokenizer, and for whom.

    form: "raw" puts text and ids into the chunk's own fields; "chat" and "completion" also render
        each delta into `Chunk.data` as the bytes of one server-sent event of OpenAI's
        chat.completion.chunk or text_completion. "pooled" is all that a pooling model has, and
        no other has it: its vector is in the one chunk.
    delta: a chunk for each step that produced text; otherwise one chunk per choice, at its end, and
        before that one now and then, so that little is lost with an engine (see TextStream).
    index_offset: added to the choice's index in rendered chunks (several prompts in one HTTP
        request).
    null_usage: rendered chunks carry `"usage": null` (stream_options.include_usage was set).
    parsers: of a chat's output. Rendered chunks are parsed by them; the text of others is left as
        it is, with the special tokens that the parsers look for.
    continuous_usage: rendered chunks carry the usage so far.
    tokens_as_ids: tokens in log-probabilities go by the name "token_id:ID".
    """

    client: int
    form: Literal["raw", "chat", "completion", "pooled"] = "raw"
    delta: bool = False
    response_id: str = ""
    model: str = ""
    created: int = 0
    index_offset: int = 0
    null_usage: bool = False
    parsers: ParserSpec | None = None
    continuous_usage: bool = False
    tokens_as_ids: bool = False


class Resume(Message):
    """A choice that goes on where an engine died: these of its output tokens the client has."""

    choice: int
    token_ids: bytes  # i32[E]


class Generate(Message, tag="generate"):
    """A request. `params.seed` is set: the client draws one where the user gave none.

    resume: at a takeover, every choice that is still open; those not named here have ended. Empty
        for a request of which nothing has come yet: all its choices begin at their beginning.
    priority: the lower, the more urgent (scheduling_policy "priority"; 0 for all with "fcfs").
    keep_prompt_tokens: of a longer prompt only so many tokens count, the last ones (and the special
        ones that the tokenizer adds); 0 keeps all.
    engine: the replica that is to serve it: its scheduler's number. Its client chooses.
    tokenizer, detokenizer: those that it goes by, all its choices together; likewise.
    """

    request_id: str
    incarnation: int
    prompt: Prompt
    params: SamplingParams
    output: OutputSpec
    arrival: float
    cache_salt: str = ""
    resume: list[Resume] = []
    priority: int = 0
    keep_prompt_tokens: int = 0
    engine: int = 0
    tokenizer: int = 0
    detokenizer: int = 0


class Abort(Message, tag="abort"):
    """End a request in the replica `engine`.

    It means this incarnation and any older one there. Answered by the Finish("abort") of each
    choice still open, or by nothing if none is. tokenizer: the one that its Generate went by, so
    that it can't overtake it; or any, once something has come of the request.
    """

    request_id: str
    incarnation: int
    engine: int = 0
    tokenizer: int = 0


class Ping(Message, tag="ping"):
    """Asks whether a replica works. It goes the way of a request and comes back to its client.

    The scheduler passes it on when a step has ended that was sent after it arrived (with nothing to
    compute, an empty one). It goes by this tokenizer and this detokenizer.
    """

    client: int
    number: int
    engine: int = 0
    tokenizer: int = 0
    detokenizer: int = 0


class ResetPrefixCache(Message, tag="reset_prefix_cache"):
    """Nothing computed before this is to be found in the prefix cache of the replica `engine` by
    whoever comes after it.

    It goes the way of a request, in order with those that go by the same tokenizer, and comes back
    to its client, by this detokenizer, when it is done. request_id tells it from all others, those
    of older incarnations of its client included.
    """

    client: int
    request_id: str
    engine: int = 0
    tokenizer: int = 0
    detokenizer: int = 0


class Tokenize(Message, tag="tokenize"):
    """Asks what tokens a prompt is. Answered by Tokenized, or by Rejected (of incarnation 0).

    with_texts: name them, too.
    """

    client: int
    request_id: str
    prompt: Prompt
    with_texts: bool = False
    tokenizer: int = 0


class Detokenize(Message, tag="detokenize"):
    """Asks what text these tokens are. Answered by Detokenized, or by Rejected, likewise."""

    client: int
    request_id: str
    token_ids: bytes  # i32[N]
    tokenizer: int = 0


ClientToTokenizer = Generate | Abort | Ping | ResetPrefixCache | Tokenize | Detokenize


# --- tokenizer -> client, tokenizer -> scheduler ------------------------------------------------


class Rejected(Message, tag="rejected"):
    """The terminal message of a request that the tokenizer refused.

    The scheduler never hears of it.
    """

    request_id: str
    incarnation: int
    error: ErrorInfo


class Accepted(Message, tag="accepted"):
    """The request has gone on to the scheduler as these tokens, which belong in the ledger."""

    request_id: str
    incarnation: int
    prompt_token_ids: bytes  # i32[num_prompt_tokens]


class Tokenized(Message, tag="tokenized"):
    """texts: the tokens by the names that they have in the vocabulary, if those were asked for."""

    request_id: str
    token_ids: bytes  # i32[N]
    texts: list[str] = []


class Detokenized(Message, tag="detokenized"):
    """Special tokens are in the text."""

    request_id: str
    text: str


TokenizerToClient = Accepted | Rejected | Tokenized | Detokenized


class AddRequest(Message, tag="add"):
    """A tokenised request. `params.max_tokens` is resolved against the context length.

    bad_words: `params.bad_words` as token ids; a word that can be written in two ways is in it
        twice.
    detokenizer: as in Generate.
    """

    request_id: str
    incarnation: int
    prompt_token_ids: bytes  # i32[num_prompt_tokens]
    params: SamplingParams
    output: OutputSpec
    arrival: float
    cache_salt: str = ""
    resume: list[Resume] = []  # as in Generate
    bad_words: list[bytes] = []  # i32[length of the word] each
    priority: int = 0  # likewise
    detokenizer: int = 0


class AbortRequest(Message, tag="abort"):
    request_id: str
    incarnation: int


class AbortClient(Message, tag="abort_client"):
    """A client has died: end all its requests that came by this tokenizer. Comes after everything
    that it had sent that way."""

    client: int


class PeersGone(Message, tag="gone"):
    """To the scheduler of another host, which isn't told by its own supervisor: these actors are
    dead, and what they had sent has come before this. Answered by PeersGoneHeard, after all that
    was said on their behalf."""

    death: int
    names: list[str]


TokenizerToScheduler = AddRequest | AbortRequest | AbortClient | Ping | ResetPrefixCache | PeersGone


# --- scheduler <-> detokenizer ------------------------------------------------------------------


class OpenStream(Message, tag="open"):
    """Choice `choice` of a request will speak as `stream`, to detokenizer stream % D of D.

    Sent for each choice before its first StreamStep. resumed: the first tokens of its output, which
    the client has: they are not sent again, and the first StreamStep's token_index follows them.
    """

    stream: int
    request_id: str
    incarnation: int
    choice: int
    num_prompt_tokens: int
    params: SamplingParams
    output: OutputSpec
    resumed: bytes = b""  # i32[E]


class StreamEnd(Message):
    """The last the scheduler says of a stream; the detokenizer forgets it after this.

    num_tokens: output tokens that count, the EOS or stop token included. Where the detokenizer
        itself ended the stream by a stop string, this only acknowledges it.
    stop_reason: the stop token id, where one was found that is not an EOS id.
    """

    stream: int
    reason: FinishReason
    num_tokens: int
    stop_reason: int | None = None
    error: ErrorInfo | None = None


class Timing(Message):
    """When the scheduler had a choice's request, sent it to the workers first, had its first token.

    Of a choice that was taken over with some output there is none.
    """

    queued: float
    scheduled: float
    first_token: float


class StreamStep(Message, tag="step"):
    """The new tokens of one step for all of a detokenizer's streams, then the ends of streams.

    cached: (stream, prompt tokens found in the prefix cache), with the stream's first token, for
        those that found any.
    timings: (stream, its Timing), with the stream's first token.
    prompt_logprobs: come in order, before the stream's first token; after a preemption from the
        beginning again.
    pooled: (stream, its vector, f32[dimension]) of a pooling model, which has no tokens; with the
        stream's end.
    """

    streams: bytes  # i64[S]
    token_index: bytes  # i32[S]: place of the token in its choice's output, from 0
    token_ids: bytes  # i32[S]
    ends: list[StreamEnd] = []
    logprobs: TokenLogprobs | None = None
    cached: list[tuple[int, int]] = []
    prompt_logprobs: list[PromptLogprobs] = []
    timings: list[tuple[int, Timing]] = []
    pooled: list[tuple[int, bytes]] = []


class PeersGoneHeard(Message, tag="gone_heard"):
    """To the gateway in the detokenizers' place, which keeps it. Sent on the way to each of them:
    what comes after it there is for the next incarnation of whoever died."""

    death: int


SchedulerToDetokenizer = OpenStream | StreamStep | Ping | ResetPrefixCache | PeersGoneHeard


class StopStream(Message, tag="stop"):
    """A stop string was found: the output ends after `num_tokens` tokens.

    Answered by the stream's StreamEnd.
    """

    stream: int
    num_tokens: int


DetokenizerToScheduler = StopStream | PeersGone


# --- detokenizer -> client ----------------------------------------------------------------------


class Finish(Message):
    """The one terminal message of a choice."""

    reason: FinishReason
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int = 0
    stop_reason: int | str | None = None
    error: ErrorInfo | None = None
    timing: Timing | None = None


class Chunk(Message):
    """New output of one choice. The tokens in it are first_index .. first_index + len(token_ids).

    text is only the new text; `data` the rendered event (see OutputSpec.form), with nothing for
    chunks that have neither text nor finish. logprobs.index counts from this chunk's first token;
    `logprob_tokens` holds the text bytes of each of logprobs.token_ids in row order (None where the
    id is -1). prompt_logprobs and prompt_logprob_tokens: the same of the request's prompt, with an
    index that counts from its beginning; in the first chunk of choice 0. pooled: the vector, where
    OutputSpec.form is "pooled".
    """

    request_id: str
    incarnation: int
    choice: int
    first_index: int
    token_ids: bytes  # i32[T]
    text: str = ""
    data: bytes = b""
    finish: Finish | None = None
    logprobs: TokenLogprobs | None = None
    logprob_tokens: list[bytes | None] = []
    prompt_logprobs: TokenLogprobs | None = None
    prompt_logprob_tokens: list[bytes | None] = []
    pooled: bytes = b""  # f32[dimension]


class Chunks(Message, tag="chunks"):
    chunks: list[Chunk]


DetokenizerToClient = Chunks | Ping | ResetPrefixCache


# --- scheduler -> coordinator, coordinator -> client --------------------------------------------


class Load(Message, tag="load"):
    """What a replica has to do, in choices, when that has changed.

    kv_usage: the share of its KV blocks that is in use. clients: (client, its choices), waiting and
    running ones, of those that have any.
    """

    waiting: int
    running: int
    kv_usage: float
    clients: list[tuple[int, int]]


class WantWave(Message, tag="want_wave"):
    """This wave is to run: the scheduler is in it, or has work that waits for it."""

    wave: int


SchedulerToCoordinator = Load | WantWave


class Loads(Message, tag="loads"):
    """What all N replicas have to do, as they said last. ours: the part of it that is of the client
    that this goes to, one of num_clients. What isn't known of a replica is -1.
    """

    waiting: bytes  # i32[N]
    running: bytes  # i32[N]
    ours: bytes  # i32[N]
    kv_usage: bytes  # f32[N]
    num_clients: int = 1


CoordinatorToClient = Loads


class StartWave(Message, tag="start_wave"):
    """To all schedulers: take part in this wave, when the one before has ended."""

    wave: int


class AskWave(Message, tag="ask_wave"):
    """From a coordinator that has just started. Answered by a WantWave, if there is one."""


CoordinatorToScheduler = StartWave | AskWave | PeersGone
