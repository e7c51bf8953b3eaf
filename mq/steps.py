"""What scheduler and workers say to each other: see messages.py, which has these names, too."""

from __future__ import annotations

from .message import Message
from .sampling_params import SamplingParams


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


class WaveStep(Message):
    """Which step this is where replicas step together: the step-th of a wave, both from 1 on (see
    actors/scheduler/waves.py). has_work: this replica has some that isn't done.
    """

    wave: int
    step: int
    has_work: bool


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

    wave: of replicas that step together. Their workers meet in each step, an empty one too.
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
    wave: WaveStep | None = None


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


class ExpertLoads(Message):
    """How many tokens each expert of a mixture has had since the worker started, as the router
    chose them; in replicas that step together, of all of them.

    layers: the numbers of the L layers that have E experts. balancedness: how even the ranks' loads
    were since the last message: (mean / most) of a layer, averaged over the layers; None without
    ranks that experts are dealt to, or tokens. rounds: of the load balancer, that are done; moved:
    experts that it has brought to a rank; seconds: spent on it, most_seconds of them in one step.
    """

    layers: list[int]
    tokens: bytes  # i64[L, E]
    balancedness: float | None = None
    rounds: int = 0
    moved: int = 0
    seconds: float = 0.0
    most_seconds: float = 0.0


class StepOutput(Message, tag="output"):
    """What a step sampled: token_ids[i] is the new token of rows[i].

    Rows that were not sampled are not in it. prompt_logprobs: of the prompts' chunks that this step
    computed, for the requests that want them. pooled: of a pooling model, which samples no tokens,
    the vector of each of rows. any_work: whether any of the replicas that step together had work.
    experts: of a mixture, now and then.
    """

    step: int
    rows: bytes  # i32[S]
    token_ids: bytes  # i32[S]
    logprobs: TokenLogprobs | None = None
    seconds: float = 0.0  # spent by the worker on this step
    prompt_logprobs: list[PromptLogprobs] = []
    pooled: bytes = b""  # f32[S, dimension]
    any_work: bool = False
    experts: ExpertLoads | None = None


WorkerToScheduler = WorkerReady | StepOutput
