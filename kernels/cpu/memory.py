"""How memory is laid out in which processes tell each other things within a step (exchange.py,
pipe.py). Without torch: who copies it to another host loads none (executor/mirror.py).

Counts have lines of their own. A slot begins with a line too, whose first word says how many bytes
of the slot are used; that is written before the count, and nobody but a copier reads it.
"""

from __future__ import annotations

LINE = 64
LANES = 8  # of an exchange
SLOT_WORDS = 8192  # of four bytes: an exchange's slot
EXCHANGE_SLOT_BYTES = LINE + 4 * SLOT_WORDS


def memory_bytes(ranks: int) -> int:
    """Of an exchange."""
    return first_slot(ranks) + LANES * 2 * ranks * EXCHANGE_SLOT_BYTES


def first_slot(ranks: int) -> int:
    """Where an exchange's slots begin."""
    return LINE * (1 + ranks + LANES * ranks)


def slot_bytes(words: int) -> int:
    """Of a pipe's slot for so many numbers of four bytes: whole lines."""
    return LINE + -(-4 * words // LINE) * LINE


def pipe_bytes(readers: int, slots: int, words: int) -> int:
    return LINE * (1 + readers) + slots * slot_bytes(words)
