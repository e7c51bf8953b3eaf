"""The batch that a worker keeps on its device, and how a step's plan gets there.

On the device: the known tokens of each row, and its block tables, one for each group of layers. The
host knows only how many tokens each row has and how many of them are computed, never the tokens
sampled last: they are appended on the device and feed the next step there.

A step goes over in one copy, from a pinned slot to `inputs`, whose address never changes:

    header      number of runs of changes, and where they begin (kernels/gpu/step.py); at TURN that
                of experts' replicas (kernels/gpu/expert_routing.py); from REPLICAS on how many
                tokens the step has, or where replicas step together each of them
    sections    rows, starts, context, decode_context, last, sample_rows, sample_positions: each of
                fixed place and capacity, padded with what makes a sequence inert
    plans       of decode attention, for each window of the model's layers
                (kernels/gpu/decode_plan.py); of no sequences where there are none
    tail        tiles of prefill attention, copies of blocks, changes: as many as there are

There is a slot for each step in flight and one more. A slot is written again only when its step has
ended and its tokens have been taken.

Sequences of a step come in this order: those of one token, the sampled ones first, then the others.
So decode attention serves a prefix of them, and in a decode step logits are a prefix of the batch.

Legend: R rows, L tokens of a row, G groups, B blocks of a row, S sequences, T tokens, N sampled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from ...kernels.gpu import step as kernels
from ...kernels.gpu.decode_plan import DecodeConfig, plan_decode, plan_size
from ...kernels.gpu.expert_routing import TURNS
from ...mq import codec
from ...mq.messages import NewSequence, StepPlan

Ints = NDArray[np.int32]

HEADER = 128
TURN, REPLICAS = 2, 64  # where in the header
SECTIONS = (
    "rows",
    "starts",
    "context",
    "decode_context",
    "last",
    "sample_rows",
    "sample_positions",
)
ALIGNMENT = 64  # numbers: of what lies in `inputs`, so that kernels see aligned addresses
TOKENS_PADDED_TO = 16
TABLE_PADDED_TO = 16  # blocks of a row: so that each group's table is aligned alike
NOBODY = -1


class Step(NamedTuple):
    """One step's sequences, in its own order, and what runs them.

    rows, lengths, context [S]: context is the tokens in the cache after the step. ends [S]: where
    each one's tokens end. sampled, positions, last [N]: the rows that get a token, its place in
    each, and the token of the step that it follows. is_decode: decode attention serves all.
    tokens: of the step, padded. decodes: the first so many tokens, padded, are a sequence each,
    for decode attention; longest: the longest context of these. longest_chunk: of all. num_tokens:
    of each replica, int32 [N], where these step together (lockstep.py).
    """

    rows: Ints
    lengths: Ints
    context: Ints
    ends: Ints
    sampled: Ints
    positions: Ints
    last: Ints
    is_decode: bool
    tokens: int
    decodes: int
    longest: int
    longest_chunk: int
    num_tokens: Ints | None = None


class Slot:
    """A step's way there and back: pinned memory on a CUDA device, and when it began and ended."""

    def __init__(self, num_inputs: int, num_outputs: int, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self.inputs = torch.zeros(num_inputs, dtype=torch.int32, pin_memory=on_gpu)
        self.numbers: Ints = self.inputs.numpy()
        self.outputs = torch.zeros(num_outputs, dtype=torch.int32, pin_memory=on_gpu)
        self.began = torch.cuda.Event(enable_timing=True) if on_gpu else None
        self.ended = torch.cuda.Event(enable_timing=True) if on_gpu else None
        self.release: Callable[[], None] | None = None  # waits for its step and takes its tokens
        self.used = 0

    def put(self, numbers: Ints) -> int:
        """Into the tail. Returns its place."""
        place = self.used
        self.numbers[place : place + numbers.size] = numbers.reshape(-1)
        self.used = _aligned(place + numbers.size)
        return place

    def room(self) -> int:
        return len(self.numbers) - self.used


class Changes:
    """Runs of numbers on their way into the rows of the batch (kernels/gpu/step.py)."""

    def __init__(self) -> None:
        self.longest = 0
        self._runs: list[Ints] = []  # [K, 4]: table, row, column, length
        self._values: list[Ints] = []

    def add(self, table: int, row: int, column: int, values: Ints) -> None:
        self._runs.append(np.array([[table, row, column, len(values)]], np.int32))
        self._values.append(values)
        self.longest = max(self.longest, len(values))

    def add_each(self, tables: Ints, rows: Ints, columns: Ints, values: Ints) -> None:
        """One number each."""
        self._runs.append(np.stack([tables, rows, columns, np.ones_like(rows)], 1))
        self._values.append(values)
        self.longest = max(self.longest, 1)

    def __len__(self) -> int:
        return sum(len(runs) for runs in self._runs)

    @property
    def size(self) -> int:
        """Numbers that `pack` returns."""
        return kernels.RUN_FIELDS * len(self) + sum(len(values) for values in self._values)

    def pack(self, place: int) -> Ints:
        """As the kernel reads them, if they lie at `place` of its array."""
        if not self._runs:
            return np.empty(0, np.int32)
        runs = np.concatenate(self._runs)
        lengths = runs[:, 3]
        sources = place + kernels.RUN_FIELDS * len(runs) + np.cumsum(lengths) - lengths
        fields = np.column_stack([runs[:, :3], sources, lengths]).astype(np.int32)
        return np.concatenate([fields.reshape(-1), *self._values]).astype(np.int32, copy=False)


class GpuBatch:
    """pad: to a number of sequences of one token that decode attention is prepared for. windows: of
    the model's layers, each once. decode: how decode attention is launched. turn: of the next step.
    """

    def __init__(
        self,
        *,
        max_num_seqs: int,
        max_tokens: int,
        max_model_len: int,
        block_size: int,
        num_groups: int,
        num_slots: int,
        pad: Callable[[int], int],
        windows: Sequence[int],
        decode: DecodeConfig,
        device: torch.device,
    ) -> None:
        self.pad, self._device = pad, device
        self.block_size, self.num_groups = block_size, num_groups
        self.capacity = pad(max(max_num_seqs, 2))
        self.max_tokens = max(_rounded(max_tokens, TOKENS_PADDED_TO), self.capacity)
        self.num_known = np.zeros(self.capacity, np.int32)
        self.num_computed = np.zeros(self.capacity, np.int32)
        self._num_blocks = np.zeros(self.capacity, np.int32)  # of all groups together
        self._changes = Changes()
        self.turn = 0
        self._width = _aligned(self.capacity + 1)
        self.decode = decode
        self._plan_width = _aligned(plan_size(self.capacity, decode))
        plans = HEADER + self._width * len(SECTIONS)
        self._plan_places = {
            window: plans + number * self._plan_width for number, window in enumerate(windows)
        }
        self._fixed = plans + self._plan_width * len(windows)
        tail = 4 * (self.max_tokens + self.capacity) * max(2, num_groups) + 16 * ALIGNMENT
        self._slots = [Slot(self._fixed + tail, self.capacity, device) for _ in range(num_slots)]
        self._next_slot = 0
        self._inert, self._inert_decode = self._template(decode=False), self._template(decode=True)
        self._allocate(max_model_len + 1, self._fixed + tail)

    def _allocate(self, length: int, num_inputs: int) -> None:
        def ints(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=self._device)

        # A kernel that serves a whole padded batch finds a row for each of its sequences.
        self.tokens_RL = ints(self.capacity, length)
        blocks = _rounded(-(-length // self.block_size), TABLE_PADDED_TO)
        self.tables_GRB = ints(self.num_groups, self.capacity, blocks)
        self.inputs = ints(num_inputs)
        self.inputs[: self._fixed] = torch.from_numpy(self._inert_decode)
        self.token_ids_T, self.positions_T = ints(self.max_tokens), ints(self.max_tokens)
        self.slots_GT = ints(self.num_groups, self.max_tokens)
        self.sampled_N = ints(self.capacity)
        self.rows_S = self._section("rows")
        self.starts_S1 = self._section("starts", self.capacity + 1)
        self.context_S = self._section("context")
        self.decode_context_S = self._section("decode_context")
        self.last_N = self._section("last")
        self.sample_rows_N = self._section("sample_rows")
        self.sample_positions_N = self._section("sample_positions")
        self.decode_plans = {
            window: self.inputs[place : place + self._plan_width]
            for window, place in self._plan_places.items()
        }

    def _place(self, name: str) -> int:
        return HEADER + self._width * SECTIONS.index(name)

    def _section(self, name: str, size: int = 0) -> torch.Tensor:
        place = self._place(name)
        return self.inputs[place : place + (size or self.capacity)]

    def _template(self, decode: bool) -> Ints:
        """The header and the sections without any sequence; in a decode step each has a token."""
        numbers = np.zeros(self._fixed, np.int32)
        numbers[1] = self._fixed
        for name in ("rows", "sample_rows"):
            numbers[self._place(name) :][: self._width] = NOBODY
        if decode:
            for name in ("starts", "last"):
                numbers[self._place(name) :][: self._width] = np.arange(self._width)
        return numbers

    # --- the host's half

    def apply(self, plan: StepPlan) -> None:
        """Take sequences out and in, and append blocks."""
        self.num_known[codec.ints(plan.removed)] = 0
        for new in plan.new:
            self._enter(new)
        if plan.block_rows:
            self._append_blocks(codec.ints(plan.block_rows), codec.ints(plan.block_ids))

    def _enter(self, new: NewSequence) -> None:
        row, tokens = new.row, codec.ints(new.token_ids)
        assert self.num_known[row] == 0, f"row {row} is taken"
        assert new.num_computed_tokens < len(tokens), f"row {row} has nothing left to compute"
        self.num_known[row], self.num_computed[row] = len(tokens), new.num_computed_tokens
        self._changes.add(0, row, 0, tokens)
        blocks = codec.ints(new.block_ids)
        self._num_blocks[row] = len(blocks)
        for group in range(self.num_groups if len(blocks) else 0):
            self._changes.add(1 + group, row, 0, blocks[group :: self.num_groups])

    def _append_blocks(self, rows: Ints, blocks: Ints) -> None:
        order = np.argsort(rows, kind="stable")  # a row may get several, in order
        rows, blocks = rows[order], blocks[order]
        nth = np.arange(len(rows), dtype=np.int32) - np.searchsorted(rows, rows)
        place, group = np.divmod(self._num_blocks[rows] + nth, self.num_groups)
        self._changes.add_each(1 + group, rows, place, blocks)
        np.add.at(self._num_blocks, rows, 1)

    def hear(self, rows: Ints, tokens: Ints) -> None:
        """Of each row the newest token, which counts as known already: it was sampled elsewhere."""
        if len(rows):
            self._changes.add_each(np.zeros_like(rows), rows, self.num_known[rows] - 1, tokens)

    @property
    def tail(self) -> int:
        """Where the tail begins, and what is put into it first."""
        return self._fixed

    @property
    def is_changed(self) -> bool:
        return len(self._changes) > 0

    def lay_out(self, rows: Ints, lengths: Ints, whole: bool = False) -> Step:
        """The next `lengths` tokens of `rows`, which count as computed from now on, and the tokens
        to be sampled, which count as known.

        whole: as prefill attention sees it, whatever its lengths.
        """
        context = self.num_computed[rows] + lengths
        known = self.num_known[rows]
        assert (context <= known).all(), "a plan computes tokens that aren't known"
        order = np.where(lengths == 1, np.where(context == known, 0, 1), 2)
        if order.any():
            by = np.argsort(order, kind="stable")
            rows, lengths, context, known = rows[by], lengths[by], context[by], known[by]
        sampled = context == known
        self.num_computed[rows] = context
        self.num_known[rows[sampled]] += 1
        ends = np.cumsum(lengths, dtype=np.int32)
        singles = 0 if whole else int(np.count_nonzero(order < 2))
        decodes = 0
        if singles:  # of one alone in a mixed step there is no kernel of its own
            decodes = self.pad(singles if singles == len(rows) else max(singles, 2))
        tokens = decodes
        if singles < len(rows):
            tokens = max(_rounded(int(ends[-1]), TOKENS_PADDED_TO), decodes)
        assert tokens <= self.max_tokens, f"{tokens} tokens, and room for {self.max_tokens}"
        return Step(
            rows,
            lengths,
            context,
            ends,
            rows[sampled],
            context[sampled],
            ends[sampled] - 1,
            singles == len(rows),
            tokens,
            decodes,
            int(context[:singles].max()) if singles else 0,
            int(lengths.max()),
        )

    # --- over to the device

    def take_slot(self) -> Slot:
        """A slot that no step uses any more; waits for one where the caller has taken no tokens."""
        slot = self._slots[self._next_slot]
        self._next_slot = (self._next_slot + 1) % len(self._slots)
        if slot.release is not None:
            slot.release()
        slot.release = None
        slot.used = self._fixed
        return slot

    def fill(self, slot: Slot, step: Step | None) -> None:
        """Write a step's sections and plans; None: there is none, only changes."""
        decode = step is not None and step.is_decode
        slot.numbers[: self._fixed] = self._inert_decode if decode else self._inert
        if step is None:
            return
        slot.numbers[TURN] = self.turn % TURNS
        counts = step.ends[-1:] if step.num_tokens is None else step.num_tokens
        slot.numbers[REPLICAS : REPLICAS + len(counts)] = counts
        sequences = len(step.rows)
        singles = np.count_nonzero(step.lengths == 1) if step.decodes else 0

        def put(name: str, values: Ints) -> None:
            place = self._place(name)
            slot.numbers[place : place + len(values)] = values

        put("rows", step.rows)
        put("context", step.context)
        put("decode_context", step.context[:singles])
        put("sample_rows", step.sampled)
        put("sample_positions", step.positions)
        if step.decodes > 1:  # one alone has a kernel without a plan
            context = np.zeros(step.decodes, np.int32)
            context[:singles] = step.context[:singles]
            for window, place in self._plan_places.items():
                plan = plan_decode(context, window, self.decode)
                slot.numbers[place : place + len(plan)] = plan
        if not decode and sequences:
            place = self._place("starts")
            slot.numbers[place + 1 : place + 1 + sequences] = step.ends
            slot.numbers[place + 1 + sequences : place + self._width] = step.ends[-1]
            put("last", step.last)

    def send(self, slot: Slot) -> None:
        """Start the copy to the device. Changes too many for a slot go before it on their own."""
        changes, self._changes = self._changes, Changes()
        if len(changes) and changes.size <= slot.room():
            slot.numbers[0] = len(changes)
            slot.numbers[1] = slot.used
            slot.put(changes.pack(slot.used))
        elif len(changes):
            self._send_apart(changes)
        self._pending_runs = int(slot.numbers[0])
        self._longest_run = changes.longest
        self.inputs[: slot.used].copy_(slot.inputs[: slot.used], non_blocking=True)

    def _send_apart(self, changes: Changes) -> None:
        on_gpu = self._device.type == "cuda"
        # torch keeps this pinned memory until its copy is done.
        apart = torch.empty(HEADER + changes.size, dtype=torch.int32, pin_memory=on_gpu)
        apart[0], apart[1] = len(changes), HEADER
        apart[HEADER:] = torch.from_numpy(changes.pack(HEADER))
        kernels.apply_changes(
            apart.to(self._device, non_blocking=True),
            self.tokens_RL,
            self.tables_GRB,
            num_runs=len(changes),
            longest=changes.longest,
        )

    def apply_changes(self) -> None:
        """What `send` has sent, on the device. Not for graphs."""
        if self._pending_runs:
            kernels.apply_changes(
                self.inputs,
                self.tokens_RL,
                self.tables_GRB,
                num_runs=self._pending_runs,
                longest=self._longest_run,
            )

    def lay_out_tokens(self, sequences: int, tokens: int, longest: int, pdl: bool = False) -> None:
        """Ids, positions and slots of the step's tokens."""
        kernels.lay_out_tokens(
            self.tokens_RL,
            self.tables_GRB,
            self.rows_S[:sequences],
            self.starts_S1[: sequences + 1],
            self.context_S[:sequences],
            self.token_ids_T[:tokens],
            self.positions_T[:tokens],
            self.slots_GT[:, :tokens],
            self.block_size,
            longest=longest,
            pdl=pdl,
        )

    def prepare_decode(self, size: int, pdl: bool) -> None:
        """All of a decode step of `size` sequences before its forward pass, for a graph."""
        kernels.apply_changes(self.inputs, self.tokens_RL, self.tables_GRB, pdl=pdl)
        self.lay_out_tokens(size, size, 1, pdl)

    def prepare_mixed(self, tokens: int) -> None:
        """The same of a step of `tokens` with prompts in it, of up to as many sequences as there
        may be.
        """
        kernels.apply_changes(self.inputs, self.tokens_RL, self.tables_GRB, longest=tokens)
        self.lay_out_tokens(self.capacity, tokens, tokens)

    def append(self, samples: int, pdl: bool = False) -> None:
        """The sampled tokens of the first `samples` become known tokens of their rows."""
        kernels.append_tokens(
            self.tokens_RL,
            self.sample_rows_N[:samples],
            self.sample_positions_N[:samples],
            self.sampled_N[:samples],
            pdl=pdl,
        )

    def num_tokens(self, replicas: int) -> torch.Tensor:
        """Of each replica in the step, on the device."""
        return self.inputs[REPLICAS : REPLICAS + replicas]

    @property
    def turn_1(self) -> torch.Tensor:
        return self.inputs[TURN : TURN + 1]

    def view(self, place: int, *shape: int) -> torch.Tensor:
        """Of what a slot put into the tail, on the device."""
        return self.inputs[place : place + int(np.prod(shape))].view(shape)


def _rounded(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _aligned(size: int) -> int:
    return _rounded(size, ALIGNMENT)
