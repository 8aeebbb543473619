"""Layouts: where the batch lies, what a reshape makes of it, and cutting along it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from koila_rl.recording.layouts import (
    Layout,
    join_into,
    reshape_layout,
    scaled_layout,
    slice_rows,
)

SIZES = st.integers(1, 3)


def test_reshape_by_hand() -> None:
    assert reshape_layout((5, 3, 2), Layout(0), (15, 2), 5) == Layout(0, 1, 3)
    assert reshape_layout((3, 5, 2), Layout(1), (15, 2), 5) == Layout(0, 3, 1)
    assert reshape_layout((15, 2), Layout(0, 1, 3), (5, 6), 5) == Layout(0)
    assert reshape_layout((5, 4), Layout(0), (4, 5), 5) is None
    assert reshape_layout((5, 4), Layout(0), (2, 10), 5) is None


def test_scaled_by_hand() -> None:
    assert scaled_layout((4, 10), (4, 14), 5, 7) == Layout(1, 1, 2)
    assert scaled_layout((4, 10), (4, 10), 5, 7) is None
    assert scaled_layout((4, 11), (4, 15), 5, 7) is None


@given(before=SIZES, outer=SIZES, n=st.integers(2, 5), inner=SIZES, after=SIZES, data=st.data())
def test_microbatches_join_to_the_whole(
    before: int, outer: int, n: int, inner: int, after: int, data: st.DataObject
) -> None:
    shape = (before, outer * n * inner, after)
    whole = torch.arange(before * outer * n * inner * after).view(shape)
    layout = Layout(1, outer, inner)
    size = data.draw(st.integers(1, n))
    joined = torch.full_like(whole, -1)
    for start in range(0, n, size):
        stop = min(start + size, n)
        rows = slice_rows(whole, layout, n, start, stop)
        assert rows.shape[1] == outer * (stop - start) * inner
        join_into(joined, rows, layout, n, start, stop)
    assert torch.equal(joined, whole)


@given(outer=SIZES, n=st.integers(2, 5), inner=SIZES, split=st.booleans())
def test_a_reshape_moves_every_sample_where_its_layout_says(
    outer: int, n: int, inner: int, split: bool
) -> None:
    """Fill each element with its sample's number, reshape, and look at the slices."""
    samples = torch.arange(n).view(1, n, 1).expand(outer, n, inner)
    shape, layout = (outer, n, inner), Layout(1)
    new = (outer * n * inner,) if split else (outer, n * inner)
    found = reshape_layout(shape, layout, new, n)
    assert found is not None
    for k in range(n):
        rows = slice_rows(samples.reshape(new), found, n, k, k + 1)
        assert bool((rows == k).all())


@pytest.mark.parametrize("shape", [(3, 0, 2), (0, 3)])
def test_reshape_of_nothing(shape: tuple[int, ...]) -> None:
    assert reshape_layout(shape, Layout(0), shape, 3) in (Layout(0), None)
