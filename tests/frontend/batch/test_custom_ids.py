"""The index of custom_ids, against a dict."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringcast.frontend.batch import custom_ids
from ringcast.frontend.batch.custom_ids import CustomIds


def check(names: list[str], others: list[str]) -> None:
    ids = CustomIds()
    first: dict[str, int] = {}
    duplicates = []
    for place, name in enumerate(names):
        ids.add(name, 2 * place)
        if first.setdefault(name, 2 * place) != 2 * place:
            duplicates.append(2 * place)
    assert sorted(ids.close()) == duplicates
    for name in [*names, *others]:
        assert ids.find(name) == first.get(name)


@given(st.lists(st.sampled_from("abcdefgh")), st.lists(st.text(max_size=3)))
def test_finds_first_lines_and_duplicates(names: list[str], others: list[str]) -> None:
    check(names, others)


@given(st.lists(st.sampled_from("abcdefgh")))
def test_half_a_digest_in_common_is_not_enough(names: list[str]) -> None:
    def digest(name: str) -> bytes:
        # Two values for the first half, so that most ids share it.
        return np.array([ord(name) % 2, ord(name)], np.uint64).tobytes()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(custom_ids, "_digest", digest)
        check(names, ["x", "y"])
