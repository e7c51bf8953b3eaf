"""One step: written down while it's planned, and kept until its output is back.

What a row means can change while a step is in flight: its sequence may end or be preempted, and the
row be given to another. So the output of row r in step s belongs to the sequence that had r in the
plan of s. If that one has ended since, it is dropped; if it was preempted, it has not come back
before this output did (planner.py), and the tokens are its next ones all the same.
"""

from __future__ import annotations

from ...mq import messages
from .packed import Repacker, packed
from .sequence import Sequence

_ONE = packed([1])


class Step:
    """sequences: what is computed, by row. num_tokens: how many tokens of each, in that order.

    chunks: (sequence, num_computed after this step) of those that are not sampled, because a part
        of their known tokens is left for a later step.
    pings: to be passed on when the step has ended. wave: of replicas that step together.
    """

    __slots__ = (
        "appended",
        "chunks",
        "copies",
        "new",
        "num_prefills",
        "num_tokens",
        "number",
        "pings",
        "sequences",
        "wave",
    )

    def __init__(self, number: int) -> None:
        self.number = number
        self.new: list[messages.NewSequence] = []
        self.appended: list[tuple[int, int]] = []  # (row, block)
        self.copies: list[tuple[int, int]] = []  # (from, to)
        self.num_tokens: list[int] = []
        self.sequences: dict[int, Sequence] = {}
        self.chunks: list[tuple[Sequence, int]] = []
        self.num_prefills = 0
        self.pings: list[messages.Ping] = []
        self.wave: messages.WaveStep | None = None

    def compute(self, sequence: Sequence, num_tokens: int) -> None:
        """The sequence, which has row and blocks for it, computes its next num_tokens tokens."""
        computed = sequence.num_computed + num_tokens
        sequence.num_computed = computed
        self.sequences[sequence.row] = sequence
        self.num_tokens.append(num_tokens)
        is_chunk = computed < len(sequence.tokens)
        if is_chunk:
            self.chunks.append((sequence, computed))
        self.num_prefills += is_chunk or num_tokens > 1

    def enter(self, sequence: Sequence) -> None:
        """The sequence is new to the workers; call it before `compute`."""
        request = sequence.request
        self.new.append(
            messages.NewSequence(
                row=sequence.row,
                request_id=request.request_id,
                choice=sequence.choice,
                token_ids=packed(sequence.tokens),
                num_prompt_tokens=sequence.num_prompt,
                num_computed_tokens=sequence.num_computed,
                block_ids=packed(sequence.block_ids),
                params=request.params,
                bad_words=request.bad_words,
            )
        )

    def plan(self, removed: list[int], pack_rows: Repacker) -> messages.StepPlan:
        num_rows = len(self.sequences)
        return messages.StepPlan(
            step=self.number,
            removed=packed(removed),
            new=self.new,
            block_rows=packed([row for row, _ in self.appended]),
            block_ids=packed([block for _, block in self.appended]),
            copy_from=packed([source for source, _ in self.copies]),
            copy_to=packed([target for _, target in self.copies]),
            rows=pack_rows(list(self.sequences)),
            num_tokens=packed(self.num_tokens) if self.num_prefills else _ONE * num_rows,
            wave=self.wave,
        )
