"""From logits to the next tokens, for all rows of a batch at once.

In this order, with vLLM's meaning of every option:

1. log-probabilities are taken from the logits as the model gave them;
2. allowed_token_ids, bad_words, min_tokens: tokens that are impossible (logit_masks.py);
3. logit_bias (logit_bias.py), then the engine's own logits processors (logits_processor.py);
4. penalties: repetition, frequency, presence (penalties.py);
5. temperature: below 1e-5 the likeliest token is taken (of equals the lowest id), and that is all;
6. min_p, 7. top_k, 8. top_p, each on what the one before left over, renormalised. The likeliest
   token always stays;
9. one uniform number picks from what is left, by inverse CDF in the order of token ids.

3 and 4 are in float32 and cost only the rows that want them.

Ties: top_k keeps every token that is as likely as the k-th. top_p keeps the smallest set, so of the
tokens as likely as the one that reaches p it takes the lowest ids. A token thus depends on its own
row and draw alone, never on its neighbours. A row with NaN or +inf gets some token, no error.

A sort would cost 3 ms a row. `truncate` finds the cuts by radix selection on the weights' bits
instead: linear in the vocabulary, whatever the distribution. Letters: S rows to sample, R of them
at random, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numba import carray, njit
from numpy.typing import NDArray

from ..kernels.cpu.openmp import Kernel
from ..kernels.cpu.scalars import pointer
from ..mq.messages import NewSequence, TokenLogprobs
from .logit_bias import LogitBias
from .logit_masks import LogitMasks
from .logits_processor import LogitsProcessor
from .logprobs import token_logprobs
from .penalties import Penalties
from .philox import SAMPLE, uniforms

Ints = NDArray[np.int32]

_MIN_TEMPERATURE = 1e-5
_MAX_TEMPERATURE = 1e30  # -inf / inf would be NaN


class Sampler:
    """The sampling options of every row of the batch, and the step from logits to tokens.

    known_tokens: the batch's own, by row. Whoever samples appends to them after each step.
    """

    def __init__(
        self,
        max_num_seqs: int,
        vocab_size: int,
        eos_token_ids: list[int],
        known_tokens: Ints,
        processors: Sequence[LogitsProcessor] = (),
    ) -> None:
        self._vocab_size = vocab_size
        self._known_tokens = known_tokens
        self._temperature = np.zeros(max_num_seqs, np.float32)
        self._top_k = np.zeros(max_num_seqs, np.int32)
        self._top_p = np.ones(max_num_seqs, np.float64)
        self._min_p = np.zeros(max_num_seqs, np.float64)
        self._seed = np.zeros(max_num_seqs, np.uint64)
        self._choice = np.zeros(max_num_seqs, np.uint64)
        self._num_logprobs = np.full(max_num_seqs, -1, np.int32)
        self._edited = np.zeros(max_num_seqs, bool)  # by what follows, the masks excepted
        self._masks = LogitMasks(max_num_seqs, vocab_size, eos_token_ids, known_tokens)
        self._bias = LogitBias(max_num_seqs, vocab_size)
        self._penalties = Penalties(max_num_seqs, vocab_size, known_tokens.shape[1])
        self._processors = [(each, np.zeros(max_num_seqs, bool)) for each in processors]
        draw_kernel.compile(torch.float32)  # now, not in somebody's first step

    def enter(self, new: NewSequence) -> None:
        """A sequence enters the batch. Its `params.seed` is set unless it is greedy."""
        row, params = new.row, new.params
        temperature = params.temperature if params.temperature >= _MIN_TEMPERATURE else 0.0
        assert temperature == 0.0 or params.seed is not None, "the client draws missing seeds"
        self._temperature[row] = min(temperature, _MAX_TEMPERATURE)
        self._top_k[row] = max(params.top_k, 0)
        self._top_p[row] = params.top_p
        self._min_p[row] = params.min_p
        self._seed[row] = (params.seed or 0) % 2**64
        self._choice[row] = new.choice
        self._num_logprobs[row] = -1 if params.logprobs is None else params.logprobs
        self._masks.enter(new)
        self._bias.enter(row, params)
        self._penalties.enter(new)
        self._edited[row] = params.penalised or bool(params.logit_bias)
        for processor, wanted in self._processors:
            wanted[row] = processor.enter(new)
            self._edited[row] |= wanted[row]

    def sample(
        self, logits: torch.Tensor, rows: Ints, positions: Ints
    ) -> tuple[Ints, TokenLogprobs | None]:
        """Choose a token for each row of `logits` [S, V] (bf16 or fp32), which are overwritten.

        rows [S]: the batch row that each speaks for. positions [S]: the place in its sequence of
        the token that is chosen now. Returns the tokens [S], and the log-probabilities of the rows
        that want any.
        """
        wanted = np.flatnonzero(self._num_logprobs[rows] >= 0)
        raw = torch.log_softmax(_pick_rows(logits, wanted).float(), -1) if wanted.size else None
        self._masks.apply(logits, rows, positions)
        edited = self._edited[rows]
        if not edited.any():
            tokens = self._choose(logits, rows, positions)
        else:
            tokens = self._choose_edited(logits, rows, positions, edited)
        if raw is None:
            return tokens, None
        table = token_logprobs(raw, wanted, tokens[wanted], self._num_logprobs[rows[wanted]])
        return tokens, table

    def _choose_edited(
        self, logits: torch.Tensor, rows: Ints, positions: Ints, edited: NDArray[np.bool_]
    ) -> Ints:
        which = np.flatnonzero(edited)
        own = _pick_rows(logits, which).float().contiguous()
        self._edit(own, rows[which], positions[which])
        chosen = self._choose(own, rows[which], positions[which])
        self._penalties.record(rows[which], chosen)
        if len(which) == len(rows):
            return chosen
        tokens = self._choose(logits, rows, positions, ~edited)
        tokens[which] = chosen
        return tokens

    def _edit(self, logits: torch.Tensor, rows: Ints, positions: Ints) -> None:
        self._bias.apply(logits, rows)
        for processor, wanted in self._processors:
            which = np.flatnonzero(wanted[rows])
            if which.size:
                part = _pick_rows(logits, which)
                processor.apply(part, rows[which], self._known_tokens, positions[which])
                if part is not logits:
                    logits[torch.from_numpy(which)] = part
        self._penalties.apply(logits, rows)

    def _choose(
        self,
        logits: torch.Tensor,
        rows: Ints,
        positions: Ints,
        asked: NDArray[np.bool_] | bool = True,
    ) -> Ints:
        """asked [S]: the rows whose tokens count."""
        is_random = self._temperature[rows] > 0
        random = np.flatnonzero(is_random & asked)
        if random.size == len(rows):
            return self._draw(logits, rows, positions)
        tokens = np.empty(len(rows), np.int32)
        if np.any(asked & ~is_random):
            # max gives the first maximum's index, and for bf16 is four times as fast as argmax.
            tokens[:] = logits.max(-1).indices.numpy()
        if random.size:
            tokens[random] = self._draw(_pick_rows(logits, random), rows[random], positions[random])
        return tokens

    def _draw(self, logits: torch.Tensor, rows: Ints, positions: Ints) -> Ints:
        # The likeliest token weighs 1: no temperature overflows, and min_p needs no maximum.
        assert logits.shape[1] == self._vocab_size
        weights = logits.float().contiguous()
        weights.sub_(weights.amax(-1, keepdim=True))
        weights.div_(torch.from_numpy(self._temperature[rows])[:, None]).exp_()
        tokens = np.empty(len(rows), np.int32)
        draw_kernel.bind(
            torch.float32,
            rows=len(rows),
            vocabulary=self._vocab_size,
            weights=weights,
            ids=np.empty(weights.shape, np.int32),  # only what truncate writes becomes memory
            uniform=uniforms(
                self._seed[rows], self._choice[rows], positions.astype(np.uint64), SAMPLE, 0
            ),
            top_k=self._top_k[rows],
            top_p=self._top_p[rows],
            min_p=self._min_p[rows],
            tokens=tokens,
        )()
        return tokens


def _pick_rows(logits: torch.Tensor, which: NDArray[np.int64]) -> torch.Tensor:
    return logits if len(which) == len(logits) else logits[torch.from_numpy(which)]


# What follows is compiled by numba. The kernel that it ends in is all that is called from above.

_BLOCK = 256
_TINY = np.float32(1e-38)
_BITS = np.uint32(10)
_MASK = np.uint32(1023)
_SHIFTS = (np.uint32(20), np.uint32(10), np.uint32(0))  # weights are at most 1.0, so 30 bits
_REORDER = {"reassoc", "nsz", "contract"}  # vectorises a sum and still respects NaN

_F32, _F64, _I32 = np.float32(0), np.float64(0), np.int32(0)

_jit: Any = njit(error_model="numpy")


@njit(error_model="numpy", fastmath=_REORDER)
def _sum(weights: Any) -> Any:
    total = 0.0
    for weight in weights:
        total += weight
    return total


@_jit
def _invert(weights: Any, uniform: Any) -> Any:
    """Where the running sum first exceeds `uniform` of the total; 0 if there is no total."""
    num_blocks = (weights.size + _BLOCK - 1) // _BLOCK
    sums = np.empty(num_blocks)
    total = 0.0
    for b in range(num_blocks):
        sums[b] = _sum(weights[b * _BLOCK : (b + 1) * _BLOCK])
        total += sums[b]
    if not total > 0.0:
        return 0
    target = uniform * total
    below = 0.0
    b = 0
    while below + sums[b] <= target:  # ends: target < total, which was added up in the same order
        below += sums[b]
        b += 1
    found = 0
    for i in range(b * _BLOCK, min((b + 1) * _BLOCK, weights.size)):
        if weights[i] > 0.0:
            found = i
            below += weights[i]
            if below > target:
                break
    return found


@_jit
def _cut(weights: Any, target: Any, by_mass: Any) -> Any:
    """The largest weight w such that all weights >= w reach `target`, counted or added up.

    Also returns what those above w reach. Bits of positive floats sort as the floats do, so ten
    bits at a time: a histogram of what begins with the bits found so far, then down from its top
    until the target is reached.
    """
    bits = weights.view(np.uint32)
    histogram = np.empty(1024)
    prefix = np.uint32(0)
    above = 0.0
    for shift in _SHIFTS:
        histogram[:] = 0.0
        for i in range(weights.size):
            part = bits[i] >> shift
            if part >> _BITS == prefix:
                histogram[part & _MASK] += weights[i] if by_mass else 1.0
        lowest = 0
        before = above
        for b in range(1023, -1, -1):
            if histogram[b] > 0.0:
                lowest = b
                before = above
                above += histogram[b]
                if above >= target:
                    break
        above = before
        prefix = (prefix << _BITS) | np.uint32(lowest)
    return np.array([prefix], np.uint32).view(np.float32)[0], above


@_jit
def truncate(weights: Any, ids: Any, top_k: Any, top_p: Any, min_p: Any) -> Any:
    """Move what survives to the front of `weights` and its token ids to the front of `ids`.

    weights [V]: float32, the largest 1.0. Ids stay in rising order. Returns how many survive.
    """
    floor = min_p
    mass = 0.0
    if top_p < 1.0 and top_k == 0 and min_p == 0.0:
        # All tokens below (1 - p) of the mean hold less than 1 - p together: none is needed.
        mass = _sum(weights)
        floor = 0.999 * (1.0 - top_p) * mass / weights.size
    least = max(np.float32(floor), _TINY)
    n = 0
    for i in range(weights.size):  # without a branch: n never overtakes i
        weight = weights[i]
        weights[n] = weight
        ids[n] = i
        n += np.int64(weight >= least)
    if 0 < top_k < n:
        kth, _ = _cut(weights[:n], np.float64(top_k), False)
        kept = 0
        for i in range(n):
            weight = weights[i]
            weights[kept] = weight
            ids[kept] = ids[i]
            kept += np.int64(weight >= kth)
        n = kept
    if top_p < 1.0:
        target = top_p * (mass if mass > 0.0 else _sum(weights[:n]))
        crossing, reached = _cut(weights[:n], target, True)
        kept = 0
        for i in range(n):
            weight = weights[i]
            if weight > crossing or (weight == crossing and reached < target):
                reached += weight if weight == crossing else 0.0
                weights[kept] = weight
                ids[kept] = ids[i]
                kept += 1
        n = kept
    return n


def _draw(p: Any, chunk: Any, chunks: Any) -> None:
    a = carray(p, 1)[0]
    weights = carray(pointer(a.weights, _F32), (a.rows, a.vocabulary))
    ids = carray(pointer(a.ids, _I32), (a.rows, a.vocabulary))
    uniform = carray(pointer(a.uniform, _F64), (a.rows,))
    top_k = carray(pointer(a.top_k, _I32), (a.rows,))
    top_p = carray(pointer(a.top_p, _F64), (a.rows,))
    min_p = carray(pointer(a.min_p, _F64), (a.rows,))
    tokens = carray(pointer(a.tokens, _I32), (a.rows,))
    for r in range(a.rows * chunk // chunks, a.rows * (chunk + 1) // chunks):
        if top_k[r] == 0 and top_p[r] == 1.0 and min_p[r] == 0.0:
            tokens[r] = _invert(weights[r], uniform[r])
        else:
            n = truncate(weights[r], ids[r], top_k[r], top_p[r], min_p[r])
            tokens[r] = ids[r, _invert(weights[r, :n], uniform[r])] if n else 0


# weights float32 [rows, vocabulary], the largest of each row 1.0, and ids int32, as large: both are
# overwritten. uniform, top_p, min_p float64 [rows]; top_k, tokens int32 [rows].
draw_kernel = Kernel(_draw, "rows vocabulary weights ids uniform top_k top_p min_p tokens")
