"""Tapes and launches of CPU kernels: their order, their threads, and what they refuse."""

from __future__ import annotations

import os

import pytest
import torch
from kernels.cpu_inputs import assert_close, count, nans

from ringcast.kernels.cpu import embedding, linear, norm, openmp


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def test_a_tape_runs_its_launches_in_order_on_all_threads():
    x, weights = torch.randn(2, 64), [torch.randn(64, 64) / 8 for _ in range(20)]
    buffers = [x, *(nans(2, 64) for _ in weights)]
    rows = count(2)
    openmp.Tape(
        linear.row_linear.bind(
            torch.float32, rows=rows, x=a, weight=w, bias=None, y=b, inner=64, outer=64
        )
        for a, w, b in zip(buffers, weights, buffers[1:], strict=False)
    )()
    expected = x
    for weight in weights:
        expected = linear.linear(expected, weight)
    assert_close(buffers[-1], expected, torch.float32, 50)


def test_a_launch_with_a_missing_argument_is_refused():
    with pytest.raises(AssertionError, match="_row_embedding"):
        embedding.row_embedding.bind(torch.float32, rows=count(1))


def test_more_threads_than_cores_do_every_chunk_once():
    before = torch.get_num_threads()
    torch.set_num_threads(2 * (os.cpu_count() or 1) + 1)
    try:
        rows = count(0)
        hidden, update, out = torch.zeros(37, 3), torch.ones(37, 3), nans(37, 3)
        add = norm.add_rms_norm_kernel.bind(
            torch.float32,
            rows=rows,
            index=None,
            hidden=hidden,
            update=update,
            update_weight=None,
            weight=torch.ones(3),
            out=out,
            size=3,
            update_stride=3,
            out_bytes=12,
            eps=1e-6,
        )
        tape = openmp.Tape([add] * 30)
        tape()
        assert not hidden.any()  # no rows, no work
        rows[0] = 37
        for _ in range(20):
            tape()
        assert (hidden == 600).all()  # each launch has added 1 once
    finally:
        torch.set_num_threads(before)
