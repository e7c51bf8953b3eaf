"""Philox against its authors' known answers; every name of a draw has a number of its own."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from ringcast.executor.philox import SAMPLE, philox4x32, uniforms

ONES = 0xFFFFFFFF
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((ONES,) * 4, (ONES,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def draw(seed: int, choice: int, position: int, purpose: int = SAMPLE, lane: int = 0) -> float:
    words = [np.array([word], np.uint64) for word in (seed, choice, position)]
    return float(uniforms(*words, purpose, lane)[0])


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN_ANSWERS)
def test_known_answers(
    counter: tuple[int, ...], key: tuple[int, ...], answer: tuple[int, ...]
) -> None:
    assert philox4x32(*counter, *key) == answer


def test_uniform_is_the_first_52_bits_of_the_block() -> None:
    high, low, *_ = KNOWN_ANSWERS[0][2]
    assert draw(0, 0, 0) == ((high >> 6 << 26) + (low >> 6)) / 2**52


def test_words_of_the_name_have_places_of_their_own() -> None:
    counter, key, answer = KNOWN_ANSWERS[2]
    position, purpose, lane, choice = counter
    seed = key[0] | key[1] << 32
    expected = ((answer[0] >> 6 << 26) + (answer[1] >> 6)) / 2**52
    assert draw(seed, choice, position, purpose, lane) == expected


def test_every_name_draws_another_number() -> None:
    seeds = (0, 1, 2**32, 2**64 - 1)
    names = itertools.product(seeds, range(4), range(16), range(3), range(3))
    numbers = [draw(*name) for name in names]
    assert len(set(numbers)) == len(numbers) == 4 * 4 * 16 * 3 * 3


def test_numbers_are_even_in_the_unit_interval() -> None:
    n = 200_000
    u = uniforms(
        np.full(n, 7, np.uint64), np.zeros(n, np.uint64), np.arange(n, dtype=np.uint64), SAMPLE, 0
    )
    assert u.min() >= 0.0
    assert u.max() < 1.0
    counts = np.bincount((u * 100).astype(int), minlength=100)
    chi_squared = ((counts - n / 100) ** 2 / (n / 100)).sum()
    assert chi_squared < 185  # 99 degrees of freedom: one in a million
    assert abs(np.corrcoef(u[:-1], u[1:])[0, 1]) < 5 / np.sqrt(n)
