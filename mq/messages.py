"""Everything that actors ever say, and nothing else: read this and know the whole conversation.

One request's way, with the edge (actors/topology.py) that carries each message:

    client -> tokenizer       Generate, Abort, Ping, ResetPrefixCache
    tokenizer -> client       Accepted, or Rejected (the request goes no further)
    tokenizer -> scheduler    AddRequest, AbortRequest, AbortClient, Ping, ResetPrefixCache (in
                              order: no abort overtakes its request)
    scheduler -> workers      StepPlan (broadcast; only what changed)
    worker -> scheduler       WorkerReady, StepOutput (only the output rank answers a step)
    scheduler -> detokenizer  OpenStream, StreamStep, Ping, ResetPrefixCache
    detokenizer -> scheduler  StopStream (a stop string was found)
    detokenizer -> client     Chunks (the last chunk of a choice carries its Finish), Ping,
                              ResetPrefixCache

A *client* is whatever holds the ledger of requests: an API server, or the process that made an
`LLM`. A *choice* is one of the n outputs of a request. A *stream* is one choice inside the engine:
a number that the scheduler gives out. An *incarnation* counts how often a request has been handed
to an engine, so that late results of an older one are recognised and dropped. A *takeover* hands it
over again after a death, with the output that its client has already (`Resume`).

Arrays travel as raw little-endian bytes: see `codec.pack` and `codec.ints`. `i32[N]` below is such
a field. Every time is `time.monotonic()` in seconds (one host, one clock).
"""

from __future__ import annotations

from typing import Literal

import msgspec

from .sampling_params import SamplingParams


class Message(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The base of all wire types."""


FinishReason = Literal["stop", "length", "abort", "error"]


class ErrorInfo(Message):
    """An error as a client may see it: HTTP status, OpenAI error type, and the field at fault."""

    message: str
    status: int = 400
    type: str = "invalid_request_error"
    param: str | None = None
    code: str | None = None


# --- client -> tokenizer ------------------------------------------------------------------------


class TextPrompt(Message, tag="text"):
    text: str
    add_special_tokens: bool = True


class TokensPrompt(Message, tag="tokens"):
    token_ids: bytes  # i32[N]


class ChatPrompt(Message, tag="chat"):
    """Messages for the model's chat template, as the JSON array that the user sent.

    tools: the JSON array of the tools that the user offers, empty for none.
    """

    messages: bytes
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template: str | None = None
    template_kwargs: bytes = b"{}"
    tools: bytes = b""


Prompt = TextPrompt | TokensPrompt | ChatPrompt


class ParserSpec(Message):
    """What is to be found in a chat's output: tool calls, reasoning (see actors/text/parsers).

    tools, reasoning: the parsers' names, "" for none.
    thinking: the prompt ends in the mark that opens the reasoning. The tokenizer sees it.
    parallel: false gives the first call only.
    """

    tools: str = ""
    reasoning: str = ""
    thinking: bool = False
    parallel: bool = True


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


class Resume(Message):
    """A choice that goes on where an engine died: these of its output tokens the client has."""

    choice: int
    token_ids: bytes  # i32[E]


class Generate(Message, tag="generate"):
    """A request. `params.seed` is set: the client draws one where the user gave none.

    resume: at a takeover, every choice that is still open; those not named here have ended. Empty
        for a request of which nothing has come yet: all its choices begin at their beginning.
    priority: the lower, the more urgent (scheduling_policy "priority"; 0 for all with "fcfs").
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


class Abort(Message, tag="abort"):
    """End a request.

    It means this incarnation and any older one. Answered by the Finish("abort") of each choice
    still open, or by nothing if none is.
    """

    request_id: str
    incarnation: int


class Ping(Message, tag="ping"):
    """Asks whether the engine works. It goes the way of a request and comes back to its client.

    The scheduler passes it on when a step has ended that was sent after it arrived (with nothing to
    compute, an empty one).
    """

    client: int
    number: int


class ResetPrefixCache(Message, tag="reset_prefix_cache"):
    """Nothing computed before this is to be found in the prefix cache by whoever comes after it.

    It goes the way of a request, in order, and comes back to its client when it is done. request_id
    tells it from all others, those of older incarnations of its client included.
    """

    client: int
    request_id: str


ClientToTokenizer = Generate | Abort | Ping | ResetPrefixCache


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


TokenizerToClient = Accepted | Rejected


class AddRequest(Message, tag="add"):
    """A tokenised request. `params.max_tokens` is resolved against the context length.

    bad_words: `params.bad_words` as token ids; a word that can be written in two ways is in it
        twice.
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


class AbortRequest(Message, tag="abort"):
    request_id: str
    incarnation: int


class AbortClient(Message, tag="abort_client"):
    """A client has died: end all its requests. Comes after everything that it had sent."""

    client: int


TokenizerToScheduler = AddRequest | AbortRequest | AbortClient | Ping | ResetPrefixCache


# --- scheduler <-> workers ----------------------------------------------------------------------


class FullAttentionSpec(Message, tag="full"):
    """Layers whose tokens see all tokens before them."""


class SlidingWindowSpec(Message, tag="sliding"):
    """Layers whose tokens see themselves and the window - 1 tokens before them."""

    window: int


KVSpec = FullAttentionSpec | SlidingWindowSpec


class NewSequence(Message):
    """A sequence that enters the workers' batch at `row`, new or again after preemption.

    token_ids: prompt and then the outputs known so far. Of these, the first `num_computed_tokens`
    have their KV in `block_ids` already; the rest is computed by this and later steps as
    StepPlan.num_tokens says. `params.seed` and `choice` are the key of the sequence's random draws.
    bad_words are the request's. block_ids: one for each group of layers (see WorkerReady), G in
    all, then the next G; 0 where the group's layers don't look any more.
    """

    row: int
    request_id: str
    choice: int
    token_ids: bytes  # i32[num_known]
    num_prompt_tokens: int
    num_computed_tokens: int
    block_ids: bytes  # i32[num_blocks, G]
    params: SamplingParams
    bad_words: list[bytes] = []  # i32[length of the word] each


class StepPlan(Message, tag="plan"):
    """One step, as a delta to the batch that every worker keeps, applied in the fields' order.

    removed: rows that leave the batch (finished, aborted, preempted); a row may be given out again
        in `new`.
    new: sequences that enter.
    block_rows, block_ids: block_ids[i] is the next block of row block_rows[i], in the order of
        NewSequence.block_ids: a row gets one for each group of layers, or several times that.
    copy_from, copy_to: whole KV blocks copied before the forward pass (copy-on-write of forks).
    rows, num_tokens: the sequences of this step and how many of their next tokens each computes. A
        row whose computed tokens reach its known tokens by this is sampled: its new token is
        appended to it by the worker, and answered in StepOutput. A decode step is num_tokens == 1.

    A pooling model has no blocks, and a row computes all its tokens in the step that it enters in.

    Workers execute plans in order, and several may be under way: a plan may compute a token that
    the one before it is still to sample. An empty plan (no rows) only updates the batch, and is
    answered with an empty StepOutput.
    """

    step: int
    removed: bytes  # i32[R]
    new: list[NewSequence]
    block_rows: bytes  # i32[A]
    block_ids: bytes  # i32[A]
    copy_from: bytes  # i32[C]
    copy_to: bytes  # i32[C]
    rows: bytes  # i32[B]
    num_tokens: bytes  # i32[B]


SchedulerToWorker = StepPlan


class WorkerReady(Message, tag="ready"):
    """The worker has loaded its model and has room for this many KV blocks, block 0 included.

    groups: of layers that share these blocks, each with a block table of its own (kv_groups.py).
    """

    rank: int
    num_blocks: int
    block_size: int
    groups: tuple[KVSpec, ...] = (FullAttentionSpec(),)


class TokenLogprobs(Message):
    """Log-probabilities of M tokens of a step, K + 1 wide: the chosen one, then the K likeliest.

    index[m] is the place in the message's token arrays that row m speaks of. Columns beyond what a
    request asked for hold token id -1. rank is 1 for the likeliest token. Taken from the
    distribution that the model gave, before all options (as vLLM's "raw_logprobs").
    """

    width: int  # K + 1
    index: bytes  # i32[M]
    token_ids: bytes  # i32[M, K + 1]
    logprobs: bytes  # f32[M, K + 1]
    rank: bytes  # i32[M]


class PromptLogprobs(Message):
    """Log-probabilities of the tokens of a prompt from place `first` on (the first token, at place
    0, has none).

    of: the row, from a worker; the stream, from the scheduler. logprobs.index counts from `first`.
    """

    of: int
    first: int
    logprobs: TokenLogprobs


class StepOutput(Message, tag="output"):
    """What a step sampled: token_ids[i] is the new token of rows[i].

    Rows that were not sampled are not in it. prompt_logprobs: of the prompts' chunks that this step
    computed, for the requests that want them. pooled: of a pooling model, which samples no tokens,
    the vector of each of rows.
    """

    step: int
    rows: bytes  # i32[S]
    token_ids: bytes  # i32[S]
    logprobs: TokenLogprobs | None = None
    seconds: float = 0.0  # spent by the worker on this step
    prompt_logprobs: list[PromptLogprobs] = []
    pooled: bytes = b""  # f32[S, dimension]


WorkerToScheduler = WorkerReady | StepOutput


# --- scheduler <-> detokenizer ------------------------------------------------------------------


class OpenStream(Message, tag="open"):
    """Choice `choice` of a request will speak as `stream`.

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


class StreamStep(Message, tag="step"):
    """The new tokens of one step for all of a detokenizer's streams, then the ends of streams.

    cached: (stream, prompt tokens found in the prefix cache), with the stream's first token, for
        those that found any.
    prompt_logprobs: come in order, before the stream's first token; after a preemption from the
        beginning again.
    pooled: (stream, its vector, f32[dimension]) of a pooling model, which has no tokens; with the
        stream's end.
    """

    streams: bytes  # i32[S]
    token_index: bytes  # i32[S]: place of the token in its choice's output, from 0
    token_ids: bytes  # i32[S]
    ends: list[StreamEnd] = []
    logprobs: TokenLogprobs | None = None
    cached: list[tuple[int, int]] = []
    prompt_logprobs: list[PromptLogprobs] = []
    pooled: list[tuple[int, bytes]] = []


SchedulerToDetokenizer = OpenStream | StreamStep | Ping | ResetPrefixCache


class StopStream(Message, tag="stop"):
    """A stop string was found: the output ends after `num_tokens` tokens.

    Answered by the stream's StreamEnd.
    """

    stream: int
    num_tokens: int


DetokenizerToScheduler = StopStream


# --- detokenizer -> client ----------------------------------------------------------------------


class Finish(Message):
    """The one terminal message of a choice."""

    reason: FinishReason
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int = 0
    stop_reason: int | str | None = None
    error: ErrorInfo | None = None


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
