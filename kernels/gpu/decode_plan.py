"""Who computes what of a decode step's attention: its sequences, one behind the other, are a row of
tiles of TILE tokens, and each of the workers takes an equal length of that row.

So whatever contexts a batch has, all workers are done at the same time, and a launch needs as many
of them as the device holds, however many sequences there are: a CUDA graph serves contexts of any
length. A worker may begin in the middle of a sequence and end in the middle of another; how what it
leaves of these is put together is decode_attention.py's. Where there are workers enough, each
sequence begins with a new one, and is cut only if it is longer than a worker's length.

A plan is int32, made on the host for each step and each window:

    length               of a worker, in tiles
    first, last          of each worker: its sequences are first <= s < last
    start                of each sequence: its first tile's place in the row

Shapes: S sequences, W workers.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .architecture import Architecture
from .decode_table import TUNED

Ints = NDArray[np.int32]

# Programs that the 132 multiprocessors of an H200 hold at once, four each.
RESIDENT = 528
# Of one sequence, so that merging them is short beside them.
MOST_PARTS = 64
SHORTEST_TOKENS = 128  # of a worker: less isn't worth a merge


class DecodeConfig(NamedTuple):
    """How a launch is cut: `workers` for each key head, which read `tile` tokens at a time."""

    workers: int
    tile: int
    warps: int
    stages: int


def choose_decode_config(
    kv_heads: int, head_size: int, itemsize: int, architecture: Architecture | None
) -> DecodeConfig:
    """itemsize: bytes of an element of the cache. architecture: whose table is looked up; what it
    hasn't got goes by a rule, measured on an H200 for heads of 128.
    """
    if found := TUNED.get(architecture, {}).get((kv_heads, head_size, itemsize)):
        return DecodeConfig(*found)
    # A tile of keys is at most 16 KiB, so that a multiprocessor has room for several programs.
    tile = max(16, min(32, 1 << (16384 // (head_size * itemsize)).bit_length() - 1))
    warps = 2 if head_size <= 128 else 4  # larger ones don't fit into two warps' registers
    return DecodeConfig(max(1, RESIDENT // kv_heads), tile, warps, 3)


def plan_size(sequences: int, config: DecodeConfig) -> int:
    return 1 + 2 * config.workers + sequences


def plan_decode(context_S: Ints, window: int, config: DecodeConfig) -> Ints:
    """The plan for sequences of these contexts, in order; 0 is padding, which is written once, too.
    window: tokens that are seen (0: all).
    """
    workers, tile = config.workers, config.tile
    begin_S = np.maximum(context_S - window, 0) // tile if window else 0
    tiles_S = np.maximum(-(-context_S // tile) - begin_S, 1)
    length = max(
        -(-int(tiles_S.sum()) // workers),
        -(-int(tiles_S.max()) // MOST_PARTS),
        -(-SHORTEST_TOKENS // tile),
    )
    parts_S = -(-tiles_S // length)
    room_S = parts_S * length if parts_S.sum() <= workers else tiles_S
    start_S = np.cumsum(room_S) - room_S
    edge_W = np.arange(workers) * length
    plan = np.empty(plan_size(len(context_S), config), np.int32)
    plan[0] = length
    plan[1 : 1 + workers] = np.searchsorted(start_S + tiles_S, edge_W, side="right")
    plan[1 + workers : 1 + 2 * workers] = np.searchsorted(start_S, edge_W + length, side="left")
    plan[1 + 2 * workers :] = start_S
    return plan
