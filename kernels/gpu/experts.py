"""The products of a mixture of experts (Shazeer et al., 2017), each of all experts at once: a
program has one block of slots (expert_routing.py), and so one expert, by some outputs.

    expert_gate_up   tokens' rows, taken where they are, to activated inner rows in slots
    expert_down      inner rows to a row for each pair, times the pair's weight
    combine          the sum of a token's rows, in the order in which its experts were chosen

Nothing is added by atomics, and a token's result doesn't depend on where its slots are; so it is
the same bits whatever else is in the batch, as long as blocks have the same size.

Programs that share a weight run side by side: of GROUP blocks first all for the same outputs.

Legend: T tokens, C chosen experts of each, P = T x C pairs, S slots, E experts, H hidden size, I
inner size.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .activation import activate, activated, check_kind
from .architecture import Architecture
from .expert_routing import Blocks, is_direct, most_blocks
from .expert_table import TUNED

GROUP = 8
COMBINED = 1024  # elements of a row that a program adds up


class ExpertConfig(NamedTuple):
    """outputs: of a program; gate and up have so many each. block: inputs at a time."""

    outputs: int
    block: int
    warps: int
    stages: int


class ExpertPlan(NamedTuple):
    """rows: slots of a block, for both products."""

    rows: int
    gate_up: ExpertConfig
    down: ExpertConfig


# The rule where nothing was tuned. By how many tokens an expert has on average, at most: reading
# weights is all the work of a few tokens; of many, it is arithmetic, for which tiles must be large.
# Measured on an H200 for Qwen3-30B-A3B and Mixtral-8x7B (scripts/gpu_bench/experts.py).
FEW = ExpertConfig(64, 128, 4, 5)
PLANS = (
    (0.5, ExpertPlan(16, FEW, ExpertConfig(64, 256, 4, 4))),
    (12, ExpertPlan(16, FEW, ExpertConfig(128, 128, 4, 4))),
    (32, ExpertPlan(32, FEW, ExpertConfig(128, 128, 4, 3))),
    (96, ExpertPlan(64, ExpertConfig(128, 64, 4, 5), ExpertConfig(128, 64, 4, 4))),
)
LARGEST_PLAN = ExpertPlan(128, ExpertConfig(128, 64, 8, 4), ExpertConfig(256, 64, 8, 4))


def choose_plan(
    pairs: int, experts: int, itemsize: int, architecture: Architecture | None
) -> ExpertPlan:
    """experts: how many there are, wherever they are held. architecture: whose table is looked up;
    PLANS are for those that have none.
    """
    if tuned := TUNED.get(architecture):
        mean = min((most for most in tuned if pairs <= most * experts), default=max(tuned))
        rows, gate_up, down = tuned[mean]
        plan = ExpertPlan(rows, ExpertConfig(*gate_up), ExpertConfig(*down))
    else:
        plan = next((plan for most, plan in PLANS if pairs <= most * experts), LARGEST_PLAN)
    if itemsize == 2:
        return plan
    halves = [config._replace(block=config.block * 2 // itemsize) for config in plan[1:]]
    return ExpertPlan(plan.rows, *halves)


def num_blocks(tokens: int, chosen: int, held: int, rows: int) -> int:
    """For which grids are made."""
    pairs = tokens * chosen
    return pairs if is_direct(tokens) else most_blocks(pairs, held, rows)


def expert_gate_up_reference(
    x_TH: torch.Tensor,
    weight_ENH: torch.Tensor,
    blocks: Blocks,
    out_SI: torch.Tensor,
    activation: str,
    *,
    chosen: int,
    rows: int,
    count: int,
    config: ExpertConfig | None = None,
    pdl: bool = False,
) -> None:
    for slots, expert, pairs in _used(blocks, rows):
        gate, up = (x_TH[pairs // chosen].float() @ weight_ENH[expert].float().T).chunk(2, -1)
        out_SI[slots] = (activate(gate, activation) * up).to(out_SI.dtype)


def expert_gate_up(
    x_TH: torch.Tensor,
    weight_ENH: torch.Tensor,
    blocks: Blocks,
    out_SI: torch.Tensor,
    activation: str,
    *,
    chosen: int,
    rows: int,
    count: int,
    config: ExpertConfig,
    pdl: bool = False,
) -> None:
    """act(gate) * up, where an expert's rows are [gate | up]; `count` blocks of `rows` slots (see
    num_blocks). Slots that are padding are left as they are.
    """
    check_kind(activation)
    outputs, inputs = weight_ENH.shape[1:]
    size = outputs // 2
    if x_TH.shape[1] != inputs or out_SI.shape[1] != size or outputs % 2:
        raise ValueError(
            f"x is {tuple(x_TH.shape)}, weight {tuple(weight_ENH.shape)}, out {tuple(out_SI.shape)}"
        )
    _check(x_TH, weight_ENH, out_SI)
    _check_blocks(blocks, out_SI, rows, count)
    _gate_up_kernel[(count * triton.cdiv(size, config.outputs),)](
        x_TH,
        weight_ENH,
        blocks.pairs_S,
        blocks.places_B,
        blocks.used_1,
        out_SI,
        count,
        x_TH.stride(0),
        out_SI.stride(0),
        size,
        inputs,
        ACTIVATION=activation,
        CHOSEN=chosen,
        EVEN=inputs % config.block == 0,
        ROWS=rows,
        OUTPUTS=config.outputs,
        BLOCK=config.block,
        STAGES=config.stages,
        GROUP=GROUP,
        PDL=pdl,
        num_warps=config.warps,
        launch_pdl=pdl,
    )


def expert_down_reference(
    x_SI: torch.Tensor,
    weight_EHI: torch.Tensor,
    blocks: Blocks,
    weights_TC: torch.Tensor,
    out_PH: torch.Tensor,
    *,
    rows: int,
    count: int,
    config: ExpertConfig | None = None,
    pdl: bool = False,
) -> None:
    for slots, expert, pairs in _used(blocks, rows):
        y = x_SI[slots].float() @ weight_EHI[expert].float().T
        out_PH[pairs] = (y * weights_TC.flatten()[pairs, None]).to(out_PH.dtype)


def expert_down(
    x_SI: torch.Tensor,
    weight_EHI: torch.Tensor,
    blocks: Blocks,
    weights_TC: torch.Tensor,
    out_PH: torch.Tensor,
    *,
    rows: int,
    count: int,
    config: ExpertConfig,
    pdl: bool = False,
) -> None:
    """As expert_gate_up, from slots to pairs. Pairs that go nowhere have no slot, and their rows
    are left as they are.
    """
    outputs, inputs = weight_EHI.shape[1:]
    if x_SI.shape[1] != inputs or out_PH.shape[1] != outputs:
        raise ValueError(
            f"x is {tuple(x_SI.shape)}, weight {tuple(weight_EHI.shape)}, out {tuple(out_PH.shape)}"
        )
    if not weights_TC.is_contiguous() or out_PH.shape[0] < weights_TC.numel():
        raise ValueError(
            f"weights is {tuple(weights_TC.shape)}, out {tuple(out_PH.shape)}; weights must be "
            "contiguous, and out have a row for each"
        )
    _check(x_SI, weight_EHI, out_PH)
    _check_blocks(blocks, x_SI, rows, count)
    _down_kernel[(count * triton.cdiv(outputs, config.outputs),)](
        x_SI,
        weight_EHI,
        blocks.pairs_S,
        blocks.places_B,
        blocks.used_1,
        weights_TC,
        out_PH,
        count,
        x_SI.stride(0),
        out_PH.stride(0),
        outputs,
        inputs,
        EVEN=inputs % config.block == 0,
        ROWS=rows,
        OUTPUTS=config.outputs,
        BLOCK=config.block,
        STAGES=config.stages,
        GROUP=GROUP,
        PDL=pdl,
        num_warps=config.warps,
        launch_pdl=pdl,
    )


def combine_reference(
    y_PH: torch.Tensor,
    places_TC: torch.Tensor,
    out_TH: torch.Tensor,
    *,
    add_to_TH: torch.Tensor | None = None,
    pdl: bool = False,
) -> None:
    tokens, chosen = places_TC.shape
    here_TC1 = (places_TC >= 0)[..., None]
    parts_TCH = y_PH[: tokens * chosen].float().view(tokens, chosen, -1)
    total_TH = torch.where(here_TC1, parts_TCH, 0.0).sum(1)
    out_TH.copy_(total_TH if add_to_TH is None else total_TH + add_to_TH.float())


def combine(
    y_PH: torch.Tensor,
    places_TC: torch.Tensor,
    out_TH: torch.Tensor,
    *,
    add_to_TH: torch.Tensor | None = None,
    pdl: bool = False,
) -> None:
    """Each token's rows added up, of those that go somewhere here; add_to, which may be `out`, is
    added too.
    """
    tokens, chosen = places_TC.shape
    size = out_TH.shape[1]
    if y_PH.shape[0] < tokens * chosen or y_PH.shape[1] != size or len(out_TH) != tokens:
        raise ValueError(
            f"y is {tuple(y_PH.shape)}, places {tuple(places_TC.shape)}, out {tuple(out_TH.shape)}"
        )
    others = () if add_to_TH is None else (add_to_TH,)
    if not places_TC.is_contiguous() or any(t.stride(1) != 1 for t in (y_PH, out_TH, *others)):
        raise ValueError("places must be contiguous, and the others have rows in one piece")
    if any(other.shape != out_TH.shape for other in others):
        raise ValueError(f"add_to is {tuple(others[0].shape)}; it must be {tuple(out_TH.shape)}")
    _combine_kernel[(tokens, triton.cdiv(size, COMBINED))](
        y_PH,
        places_TC,
        add_to_TH,
        out_TH,
        y_PH.stride(0),
        0 if add_to_TH is None else add_to_TH.stride(0),
        out_TH.stride(0),
        size,
        CHOSEN=chosen,
        BLOCK=COMBINED,
        PDL=pdl,
        num_warps=4,
        launch_pdl=pdl,
    )


def _used(blocks: Blocks, rows: int) -> list[tuple[torch.Tensor, int, torch.Tensor]]:
    """The slots, the place and the pairs of each block, without padding."""
    used = []
    for block in range(int(blocks.used_1)):
        pairs = blocks.pairs_S[block * rows : (block + 1) * rows].long()
        real = (pairs >= 0).nonzero().flatten()
        used.append((block * rows + real, int(blocks.places_B[block]), pairs[real]))
    return used


def _check(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    if not weight.is_contiguous() or x.stride(1) != 1 or out.stride(1) != 1:
        raise ValueError("weights must be contiguous, and x and out have rows in one piece")
    if x.dtype != weight.dtype:
        raise ValueError(f"x is {x.dtype}, weight {weight.dtype}; they must be alike")


def _check_blocks(blocks: Blocks, rows_S: torch.Tensor, rows: int, count: int) -> None:
    slots = min(len(blocks.pairs_S), len(rows_S))
    if len(blocks.places_B) < count or slots < count * rows:
        raise ValueError(
            f"{count} blocks of {rows} slots; there is room for {len(blocks.places_B)} blocks and "
            f"{slots} slots"
        )


@triton.jit
def _place(count, tiles, GROUP: tl.constexpr):
    """The block and the tile of outputs of this program."""
    program = tl.program_id(0)
    group = program // (GROUP * tiles)
    first = group * GROUP
    height = tl.minimum(count - first, GROUP)
    within = program - group * (GROUP * tiles)
    return first + within % height, within // height


@triton.jit
def _rows(places, k, start, inputs, EVEN: tl.constexpr):
    if EVEN:
        block = tl.load(places + start)
    else:
        block = tl.load(places + start, mask=k < inputs - start, other=0.0)
    return block


@triton.jit(do_not_specialize=["count"])
def _gate_up_kernel(
    x,
    weight,
    pairs,
    block_places,
    used,
    out,
    count,
    x_stride,
    out_stride,
    size,
    inputs,
    ACTIVATION: tl.constexpr,
    CHOSEN: tl.constexpr,
    EVEN: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    GROUP: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    block, tile = _place(count, tl.cdiv(size, OUTPUTS), GROUP)
    number = tl.load(block_places + block, mask=block < tl.load(used), other=-1)
    if number >= 0:  # else the block is past those in use, or has another rank's pair
        expert = number.to(tl.int64)
        slot = block * ROWS + tl.arange(0, ROWS)
        pair = tl.load(pairs + slot)
        # Padding reads a token, too: no load needs a mask for it, and nothing is written.
        token = tl.maximum(pair, 0) // CHOSEN
        k = tl.arange(0, BLOCK)[None, :]
        n = tile * OUTPUTS + tl.arange(0, OUTPUTS)
        row = tl.minimum(n, size - 1).to(tl.int64)
        x_places = x + token.to(tl.int64)[:, None] * x_stride + k
        gates = weight + (expert * 2 * size + row)[:, None] * inputs + k
        ups = gates + size.to(tl.int64) * inputs
        gate = tl.zeros([ROWS, OUTPUTS], tl.float32)
        up = tl.zeros([ROWS, OUTPUTS], tl.float32)
        for start in tl.range(0, inputs, BLOCK, num_stages=STAGES):
            values = _rows(x_places, k, start, inputs, EVEN)
            of_gate = _rows(gates, k, start, inputs, EVEN)
            of_up = _rows(ups, k, start, inputs, EVEN)
            gate = tl.dot(values, tl.trans(of_gate), gate, input_precision="tf32x3")
            up = tl.dot(values, tl.trans(of_up), up, input_precision="tf32x3")
        result = activated(gate, ACTIVATION) * up
        places = out + slot.to(tl.int64)[:, None] * out_stride + n[None, :]
        inside = (pair >= 0)[:, None] & (n < size)[None, :]
        tl.store(places, result.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["count"])
def _down_kernel(
    x,
    weight,
    pairs,
    block_places,
    used,
    weights,
    out,
    count,
    x_stride,
    out_stride,
    outputs,
    inputs,
    EVEN: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    GROUP: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    block, tile = _place(count, tl.cdiv(outputs, OUTPUTS), GROUP)
    number = tl.load(block_places + block, mask=block < tl.load(used), other=-1)
    if number >= 0:  # else the block is past those in use, or has another rank's pair
        expert = number.to(tl.int64)
        slot = block * ROWS + tl.arange(0, ROWS)
        pair = tl.load(pairs + slot)
        real = pair >= 0
        k = tl.arange(0, BLOCK)[None, :]
        n = tile * OUTPUTS + tl.arange(0, OUTPUTS)
        row = tl.minimum(n, outputs - 1).to(tl.int64)
        x_places = x + slot.to(tl.int64)[:, None] * x_stride + k
        w_places = weight + (expert * outputs + row)[:, None] * inputs + k
        y = tl.zeros([ROWS, OUTPUTS], tl.float32)
        for start in tl.range(0, inputs, BLOCK, num_stages=STAGES):
            values = _rows(x_places, k, start, inputs, EVEN)
            of_weight = _rows(w_places, k, start, inputs, EVEN)
            y = tl.dot(values, tl.trans(of_weight), y, input_precision="tf32x3")
        y *= tl.load(weights + pair, mask=real, other=0.0)[:, None]
        places = out + pair.to(tl.int64)[:, None] * out_stride + n[None, :]
        inside = real[:, None] & (n < outputs)[None, :]
        tl.store(places, y.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _combine_kernel(
    y,
    places,
    add_to,
    out,
    y_stride,
    add_stride,
    out_stride,
    size,
    CHOSEN: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = h < size
    total = tl.zeros([BLOCK], tl.float32)
    for c in tl.static_range(CHOSEN):
        pair = token * CHOSEN + c
        here = inside & (tl.load(places + pair) >= 0)
        total += tl.load(y + pair * y_stride + h, mask=here, other=0.0).to(tl.float32)
    if add_to is not None:
        total += tl.load(add_to + token * add_stride + h, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token * out_stride + h, total.to(out.dtype.element_ty), mask=inside)
