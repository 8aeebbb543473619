"""Operators that read, move or write rows along the batch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import koila_rl

from .agreement import agree

N = 7
INDEX = torch.tensor([5, 0, 0, 6])
Function = Callable[..., Tensor]


def _matrix() -> Tensor:
    return torch.randn(N, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def _tail(x: Tensor) -> Tensor:
    rest = x[1:]
    return rest.sin() / rest.shape[0]


READS: dict[str, Function] = {
    "first row": lambda x: x[0],
    "last row": lambda x: x[-1] * 2,
    "first rows": lambda x: x[:3].sin(),
    "all but the first": _tail,
    "every second row": lambda x: x[::2].exp(),
    "differences": lambda x: x[1:] - x[:-1],
    "diff": lambda x: torch.diff(x, dim=0, n=2),
    "flip nothing": lambda x: x.flip(()),
    "flip": lambda x: x.flip(0).sin(),
    "flip both": lambda x: x.flip(0, 1),
    "roll": lambda x: x.roll(3, 0).sin(),
    "roll two": lambda x: x.roll((2, 1), (0, 1)),
    "roll flattened": lambda x: x.roll(5),
    "turn": lambda x: torch.rot90(x),
    "turn three times": lambda x: torch.rot90(x, 3),
    "rows by whole index": lambda x: x[INDEX],
    "elements by whole index": lambda x: x[INDEX, torch.tensor([0, 1, 2, 3])],
    "elements by negative index": lambda x: x[torch.tensor([[-1], [2]]), torch.tensor([1, -2])],
    "index_select": lambda x: x.index_select(0, INDEX),
    "gather": lambda x: x.gather(0, torch.tensor([[3, 6, 0, 0], [1, 1, 1, 2]])),
    "take": lambda x: x.take(torch.tensor([[27, 0], [13, 5]])),
    "embedding": lambda x: torch.nn.functional.embedding(INDEX, x, padding_idx=6),
    "diagonal": lambda x: x.diagonal(),
    "diagonal below": lambda x: x.diagonal(-2),
    # Wide, since eager's gradient of a tall matrix is wrong before torch 2.13.
    "trace": lambda x: x.t().trace(),
    "tril": lambda x: x.tril(1),
    "triu of columns": lambda x: x.t().triu(-1),
    "pad": lambda x: torch.nn.functional.pad(x, (1, 0, 2, 1), value=3.0),
    "crop": lambda x: torch.nn.functional.pad(x, (0, 0, -1, -2)),
    "windows": lambda x: x.unfold(0, 3, 2).sum(-1),
    "parts": lambda x: torch.cat([part.sum(0) for part in x.split(3)]),
    "parts of sizes": lambda x: x.split([2, 5])[1].sin(),
    "unbind": lambda x: x.unbind(0)[3] + x.unbind(0)[1],
    "matrix of a diagonal": lambda x: torch.diag_embed(x.sum(1)),
    "place of the greatest": lambda x: x.argmax(0),
    "place among all": lambda x: x.argmin(),
    "greatest with place": lambda x: x.max(0).values * x.min(0).indices,
    "renorm": lambda x: x.renorm(2, 1, 0.5),
}  # fmt: skip


@pytest.mark.parametrize("name", READS)
@pytest.mark.parametrize("microbatch", [1, 3])
def test_reads(name: str, microbatch: int) -> None:
    agree(READS[name], _matrix(), microbatch=microbatch)


ROWS = torch.arange(8, dtype=torch.float64).view(2, 4)
WRITES: dict[str, Function] = {
    "index_add": lambda x: x.index_add(0, INDEX, torch.cat([ROWS, ROWS]), alpha=2),
    "index_copy": lambda x: x.index_copy(0, INDEX[2:], ROWS),
    "index_fill": lambda x: x.index_fill(0, INDEX, 3.0),
    "index_put": lambda x: x.index_put((INDEX[2:],), ROWS),
    "index_put elements": lambda x: x.index_put((INDEX, torch.tensor([0, 1, 1, 3])), ROWS[1],
                                                accumulate=True),
    "scatter": lambda x: x.scatter(0, INDEX[1:].view(3, 1), 5.0),
    "scatter_add": lambda x: x.scatter_add(0, INDEX.view(1, 4), ROWS),
    "scatter_reduce": lambda x: x.scatter_reduce(0, INDEX.view(1, 4), ROWS, "amax"),
    "select_scatter": lambda x: x.select_scatter(ROWS[1], 0, -2),
    "slice_scatter": lambda x: x.slice_scatter(ROWS, 0, 1, 5, 3),
    "diagonal_scatter": lambda x: x.diagonal_scatter(ROWS[1], -1),
    "diagonal_scatter of columns": lambda x: x.t().diagonal_scatter(ROWS[1], 1),
}  # fmt: skip


@pytest.mark.parametrize("name", WRITES)
def test_writes(name: str) -> None:
    agree(WRITES[name], _matrix())


def test_rows_that_are_not_finite_do_not_leak_into_others() -> None:
    x = _matrix()
    x[3] = float("nan")
    x[4] = float("inf")
    with koila_rl.limits(microbatch=2):
        rows = koila_rl.materialize(koila_rl.lazy(x)[INDEX])
    torch.testing.assert_close(rows, x[INDEX], rtol=0, atol=0)


def test_views_that_hold_at_one_size_only() -> None:
    x = torch.randn(6, 2, dtype=torch.float64)
    agree(lambda x: x.view(2, 3, 2).sin(), x)
    agree(lambda x: x.unflatten(0, (3, 2)).sum(1), x)
    agree(lambda x: x.as_strided((3, 2), (1, 4)), x)


def test_sizes_of_other_rows_are_numbers_to_the_minibatch() -> None:
    def function(x: Tensor) -> Tensor:
        count = x[1:].shape[0]
        return x.view(count + 1, 2, 2).sum(1) / count

    agree(function, _matrix())


def test_unbind_into_many_rows_is_whole_and_right() -> None:
    with pytest.warns(koila_rl.errors.UnsplitWarning, match="unbind"):
        agree(lambda x: torch.stack(x.unbind(0)).cumsum(0), torch.randn(70, 1).double(),
              microbatch=30, splits=False)  # fmt: skip


def test_a_write_without_gradients_keeps_the_graph() -> None:
    def function(x: Tensor) -> Tensor:
        y = x * 2
        view = y[:, 1:]
        with torch.no_grad():
            y.clamp_(min=0.3)
        return (y**2).sum() + (view**3).sum()

    agree(function, _matrix())


def test_a_variance_is_validated_at_the_run() -> None:
    def function(x: Tensor) -> Tensor:
        return torch.nn.functional.gaussian_nll_loss(x, x.detach() + 1, x.exp(), full=True)

    agree(function, _matrix())
    with koila_rl.limits(microbatch=2):
        x = koila_rl.lazy(_matrix())
        loss = torch.nn.functional.gaussian_nll_loss(x, x, x)
        with pytest.raises(ValueError, match="var has negative"):
            loss.item()


def test_differences_of_differences_down_to_one_row() -> None:
    with pytest.warns(koila_rl.errors.UnsplitWarning, match="diff"):
        agree(lambda x: torch.diff(x, dim=0, n=6), _matrix(), splits=False)
