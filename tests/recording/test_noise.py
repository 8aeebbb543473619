"""Noise of a given shape is eager's own, whatever the microbatch size."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.distributions import Categorical, Normal

import koila_rl

N = 23

DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "normal_": lambda x: x.clone().data.normal_(0.5, 2.0),
    "uniform_": lambda x: x.clone().uniform_(-1, 1),
    "bernoulli_": lambda x: x.clone().bernoulli_(0.3),
    "exponential_ of a view": lambda x: x.clone()[:, 1:].exponential_(),
    "randn_like": torch.randn_like,
    "rand_like": lambda x: torch.rand_like(x, dtype=torch.float32).double(),
    "Categorical.sample": lambda x: Categorical(logits=x).sample()[:, None].double(),
    "multinomial": lambda x: x.softmax(-1).multinomial(1).double(),
    "Normal.sample": lambda x: Normal(x, x.exp()).sample(),
    "randint_like": lambda x: torch.randint_like(x, 5),
}


@pytest.mark.parametrize("microbatch", [1, 7, N])
@pytest.mark.parametrize("name", list(DRAWS))
def test_noise_is_eager_s(name: str, microbatch: int) -> None:
    x = torch.randn(N, 3, dtype=torch.float64)
    w = torch.ones(3, dtype=torch.float64, requires_grad=True)

    def program(x: Tensor) -> tuple[Tensor, Tensor]:
        torch.manual_seed(1)
        y = x * w
        noise = DRAWS[name](x)
        return (y[:, -noise.shape[1] :] * noise).sum(), torch.rand(1)

    expected, after = program(x)
    expected.backward()
    wanted, w.grad = w.grad, None
    with koila_rl.limits(microbatch=microbatch):
        got, later = program(koila_rl.lazy(x))
        got.backward()
    assert later == after
    assert wanted is not None
    torch.testing.assert_close(w.grad, wanted, rtol=0, atol=1e-12)


def test_a_write_of_noise_ends_the_graph_as_in_eager() -> None:
    w = torch.ones(3, requires_grad=True)
    y = koila_rl.lazy(torch.ones(N, 3)) * w
    y.normal_()
    y.sum().backward()
    assert w.grad is not None
    assert (w.grad == 0).all()


def test_large_noise_is_drawn_microbatch_by_microbatch() -> None:
    x = koila_rl.lazy(torch.zeros(N, 300))
    assert isinstance(torch.randn_like(x), koila_rl.LazyTensor)
    assert not isinstance(torch.randn_like(x[:, :10]), koila_rl.LazyTensor)


def test_a_draw_that_nobody_uses_moves_the_generator_all_the_same() -> None:
    def after(x: Tensor) -> Tensor:
        torch.manual_seed(1)
        Categorical(logits=x).sample()
        Normal(x, x.exp()).sample()
        return torch.rand(1)

    x = torch.randn(N, 3)
    assert after(koila_rl.lazy(x)) == after(x)


def test_probabilities_that_are_none_are_told() -> None:
    probs = koila_rl.lazy(-torch.ones(N, 3))
    with pytest.raises(ValueError, match="probability tensor contains"):
        torch.multinomial(probs, 1).tolist()
