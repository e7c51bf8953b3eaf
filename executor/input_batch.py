"""The batch that a worker keeps between steps, and what one step's kernels read of it.

A row is a sequence: its known tokens, how many of them have their keys and values in the cache, and
its block tables, one for each group of layers (mq/kv_groups.py). A plan changes only what it names.
`prepare` lays the step's tokens out one sequence after the other (a "super-sequence") in arrays
whose addresses never change, since the kernels are bound to them:

    token_ids, positions          one per token
    slots                         one per group and token: block * block size + offset
    starts                        where each sequence's tokens begin, and the end of the last
    context, rows                 one per sequence: its tokens in the cache after the step, its row
    last                          the last token of each sampled sequence, which makes logits
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..mq import codec
from ..mq.messages import NewSequence, StepPlan

Ints = NDArray[np.int32]


class Step(NamedTuple):
    """One step. sampled: the rows that get a new token; sample_positions: its place in each."""

    num_tokens: int
    num_sequences: int
    lengths: Ints
    sampled: Ints
    sample_positions: Ints


class InputBatch:
    def __init__(
        self,
        max_num_seqs: int,
        max_tokens: int,
        max_model_len: int,
        block_size: int,
        num_groups: int = 1,
    ) -> None:
        length = max_model_len + 1  # the token sampled last is stored, though nothing follows it
        self.block_size = block_size
        self.num_groups = num_groups
        self.known_tokens = np.zeros((max_num_seqs, length), np.int32)
        self.num_known = np.zeros(max_num_seqs, np.int32)
        self.num_computed = np.zeros(max_num_seqs, np.int32)
        self.tables = np.zeros((num_groups, max_num_seqs, -(-length // block_size)), np.int32)
        self.num_blocks = np.zeros(max_num_seqs, np.int32)
        self.token_ids = np.zeros(max_tokens, np.int32)
        self.positions = np.zeros(max_tokens, np.int32)
        self.slots = np.zeros((num_groups, max_tokens), np.int32)
        self.starts = np.zeros(max_num_seqs + 1, np.int32)
        self.context = np.zeros(max_num_seqs, np.int32)
        self.rows = np.zeros(max_num_seqs, np.int32)
        self.last = np.zeros(max_num_seqs, np.int32)

    def apply(self, plan: StepPlan) -> None:
        """Take sequences out and in, and append blocks."""
        self.num_known[codec.ints(plan.removed)] = 0
        for new in plan.new:
            self._enter(new)
        if plan.block_rows:
            self._append_blocks(codec.ints(plan.block_rows), codec.ints(plan.block_ids))

    def _enter(self, new: NewSequence) -> None:
        tokens, blocks = codec.ints(new.token_ids), codec.ints(new.block_ids)
        assert self.num_known[new.row] == 0, f"row {new.row} is taken"
        assert new.num_computed_tokens < len(tokens), f"row {new.row} has nothing left to compute"
        self.known_tokens[new.row, : len(tokens)] = tokens
        self.num_known[new.row] = len(tokens)
        self.num_computed[new.row] = new.num_computed_tokens
        self.tables[:, new.row] = 0
        by_group = blocks.reshape(-1, self.num_groups).T
        self.tables[:, new.row, : by_group.shape[1]] = by_group
        self.num_blocks[new.row] = len(blocks)

    def _append_blocks(self, rows: Ints, blocks: Ints) -> None:
        order = np.argsort(rows, kind="stable")  # a row may get several, in order
        rows, blocks = rows[order], blocks[order]
        nth = np.arange(len(rows)) - np.searchsorted(rows, rows)
        place, group = np.divmod(self.num_blocks[rows] + nth, self.num_groups)
        self.tables[group, rows, place] = blocks
        np.add.at(self.num_blocks, rows, 1)

    def prepare(self, rows: Ints, lengths: Ints) -> Step:
        """Lay out the next `lengths` tokens of `rows`, and count them as computed."""
        sequences, tokens = len(rows), int(lengths.sum())
        assert tokens <= len(self.token_ids), f"{tokens} tokens, and room for {len(self.token_ids)}"
        ends = np.cumsum(lengths, dtype=np.int32)
        self.starts[1 : sequences + 1] = ends
        before = self.num_computed[rows]
        context = before + lengths
        sequence = np.repeat(np.arange(sequences), lengths)
        positions = np.arange(tokens, dtype=np.int32) + (context - ends)[sequence]
        of_token = rows[sequence]
        self.positions[:tokens] = positions
        self.token_ids[:tokens] = self.known_tokens[of_token, positions]
        block, offset = np.divmod(positions, self.block_size)
        self.slots[:, :tokens] = self.tables[:, of_token, block] * self.block_size + offset
        self.context[:sequences] = context
        self.rows[:sequences] = rows
        self.num_computed[rows] = context
        known = self.num_known[rows]
        assert (context <= known).all(), "a plan computes tokens that aren't known"
        done = np.flatnonzero(context == known)
        self.last[: len(done)] = ends[done] - 1
        return Step(tokens, sequences, lengths, rows[done], context[done])

    def append(self, rows: Ints, tokens: Ints) -> None:
        """Append the token that was sampled for each of `rows`."""
        self.known_tokens[rows, self.num_known[rows]] = tokens
        self.num_known[rows] += 1
