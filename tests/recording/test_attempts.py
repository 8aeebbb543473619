"""Calls whose shapes can be read in several ways: dimensions that happen to be N."""

from __future__ import annotations

import pytest
import torch

import koila_rl

from .agreement import agree

N = 5


def _random(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(len(shape))
    return torch.randn(shape, dtype=torch.float64, generator=generator)


def test_a_captured_square_meets_both_sizes() -> None:
    square = _random(N, N)
    agree(lambda x, y: (x + y) * square, _random(N, 1), _random(N))


def test_square_products() -> None:
    a, b = _random(N, N), _random(N, N)
    agree(lambda x: torch.addmm(x, a, b), _random(N, N))
    agree(lambda x: torch.addmm(a, x, b), _random(N, N))
    agree(lambda x: torch.addmm(a, b, x), _random(N, N))


def test_batched_weights_that_lie_along_features() -> None:
    agree(lambda x, mask: x.masked_fill(mask > 0, 1.0), _random(N, N), _random(N))
    agree(
        lambda x, w, b: torch.nn.functional.group_norm(x, 1, w, b),
        _random(N, N, 2), _random(N), _random(N),
    )  # fmt: skip
    agree(lambda x, w: torch.lerp(x, w, 0.4), _random(N, N), _random(N))


def test_channels_of_one_sample_as_the_batch() -> None:
    weight, bias = _random(2, N, 3), _random(2)
    agree(lambda x: torch.nn.functional.conv1d(x, weight, bias), _random(N, 6))


@pytest.mark.parametrize("order", [0, 0.5, 1, 2, 3, float("inf"), -float("inf"), -1])
def test_norms_of_every_order(order: float) -> None:
    agree(lambda x: torch.linalg.vector_norm(x, order, dim=0), _random(N, 3))


def test_a_norm_with_an_infinite_element_has_pytorchs_gradient() -> None:
    x = _random(N, 2)
    x[0, 1] = float("inf")
    whole, mine = x.clone().requires_grad_(), x.clone()
    torch.linalg.vector_norm(whole).backward()
    assert whole.grad is not None
    assert not whole.grad[1:].isnan().any()

    mine.requires_grad_()
    with koila_rl.limits(microbatch=2):
        torch.linalg.vector_norm(koila_rl.lazy(mine)).backward()
    torch.testing.assert_close(mine.grad, whole.grad, equal_nan=True, rtol=0, atol=1e-15)


def test_one_call_at_other_numbers() -> None:
    """A number may decide how a call runs: the analysis at one says nothing about another."""
    for p in (1.0, 2.0, 0.0, float("inf")):
        agree(lambda x, p=p: x.norm(p), _random(N, 3))
    target = torch.tensor([0, 2, 1, 1, 0])
    for smoothing in (0.0, 0.3):
        agree(
            lambda x, s=smoothing: torch.nn.functional.cross_entropy(x, target, label_smoothing=s),
            _random(N, 3),
        )


def test_the_other_size_of_an_outer_product_stays_whole() -> None:
    agree(lambda x: torch.linalg.vander(x), _random(N))
    agree(lambda x: x.unsqueeze(1) * x, _random(N))


def test_a_vector_times_a_matrix() -> None:
    matrix = _random(N, 3)
    agree(lambda x: x @ matrix, _random(N))


def test_take_along_the_flattened_minibatch() -> None:
    index = torch.tensor([[3, 14], [0, 1], [7, 7], [2, 5], [9, 11]])
    agree(lambda x, i: torch.take_along_dim(x, i), _random(N, 3), index)


def test_a_conjugate_keeps_the_gradient() -> None:
    with pytest.warns(koila_rl.errors.UnsplitWarning, match="fft_hfft"):
        agree(lambda x: torch.fft.hfft(x), _random(N), splits=False)


def test_bags_of_one_size() -> None:
    tokens = torch.tensor([[0, 3], [1, 1], [4, 2], [3, 0], [2, 2]])
    table = _random(6, 3)
    for mode in ("sum", "mean", "max"):
        agree(
            lambda i, x, m=mode: torch.nn.functional.embedding_bag(i, table, mode=m) * x,
            tokens, _random(N, 3),
        )  # fmt: skip


def test_norms_of_negative_orders_in_turn() -> None:
    for order in (-3.5, -1.5):
        agree(lambda x, p=order: x.norm(p), _random(N, 3))
