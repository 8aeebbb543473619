"""Networks that run in microbatches throughout, with eager's values and gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.engine import losses as L
from tests.engine import networks as K
from tests.engine.networks import Case, integers, normal
from tests.helpers import CallCounter, allow_unsplit, check, peak_bytes

N = 11


def images(n: int) -> tuple[Tensor, ...]:
    return integers(256, n, 2, 44, 44).to(torch.uint8), normal(n, 4)


def small_images(n: int) -> tuple[Tensor, ...]:
    return normal(n, 2, 16, 16), normal(n, 4)


def points(size_in: int, size_out: int) -> Any:
    return lambda n: (normal(n, size_in), normal(n, size_out))


def gaussian_batch(n: int) -> tuple[Tensor, ...]:
    return normal(n, 8), normal(n, 2)


def noisy() -> nn.Module:
    return nn.Sequential(K.NoisyLinear(8, 64), nn.ReLU(), K.NoisyLinear(64, 4))


def discrete_heads() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 9))


CASES = [
    Case("MLP", K.mlp, points(24, 4), K.regression),
    Case("Nature CNN", K.NatureCNN, images, K.regression),
    Case("IMPALA with GroupNorm", lambda: K.Impala("group"), small_images, K.regression),
    Case("IMPALA with LayerNorm", lambda: K.Impala("layer"), small_images, K.regression),
    *(
        K.recurrent(kind, batch_first, state)
        for kind in (nn.LSTM, nn.GRU)
        for batch_first in (True, False)
        for state in ("none", "zeros", "given")
    ),
    Case("transformer encoder", K.Encoder, L.tokens_and_target, K.regression),
    Case("bag of tokens, mean", lambda: K.Bag("mean"), L.tokens_and_target, K.regression),
    Case("bag of tokens, sum", lambda: K.Bag("sum"), L.tokens_and_target, K.regression),
    Case("mixture of experts", K.Mixture, points(8, 4), K.regression),
    Case("dueling", K.Dueling, points(8, 5), K.regression),
    Case("C51", L.Categorical51, L.transitions, L.c51),
    Case("QR-DQN", L.Quantiles, L.transitions, L.qr_dqn),
    Case("IQN", L.ImplicitQuantiles, L.iqn_batch, L.iqn),
    Case("noisy linear", noisy, points(8, 4), K.regression),
    Case("squashed Gaussian", L.Gaussian, gaussian_batch, L.squashed_gaussian),
    Case("transformed Gaussian", L.Gaussian, gaussian_batch, L.transformed_gaussian),
    Case("MultiDiscrete", discrete_heads, L.multi_discrete_batch, L.multi_discrete),
    Case(
        "token policy gradient",
        K.PolicyAndReference,
        L.completions,
        L.token_policy_gradient,
    ),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_splits_with_eager_values_and_gradients(case: Case) -> None:
    torch.manual_seed(0)
    check(case.program, case.batch(N), case.module(), dim=case.dim, sizes=(1, 3, 10), splits=True)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_peak_is_flat_in_the_size_of_the_minibatch(case: Case) -> None:
    torch.manual_seed(0)
    module = case.module()

    def peak(size: int, microbatch: int | None) -> int:
        batch = (case.wide or case.batch)(size)
        return peak_bytes(case.program, batch, module, microbatch, case.dim)

    small, large = peak(64, 32), peak(256, 32)
    assert large <= 1.05 * small
    # Weights and their gradients are the floor; what eager needs above it shows the split.
    assert large < 0.6 * peak(256, None)


class BatchNormStack(nn.Module):
    """Linear layers with batch statistics between them, so that each block is a stage."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        layers = [layer for _ in range(blocks) for layer in (nn.Linear(8, 8), nn.BatchNorm1d(8))]
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for linear, norm in zip(self.layers[::2], self.layers[1::2], strict=True):
            x = x + torch.relu(norm(linear(x)))
        return x


@pytest.mark.parametrize("blocks", [1, 3])
def test_batch_norm_in_training(blocks: int) -> None:
    torch.manual_seed(0)
    check(K.regression, (normal(N, 8), normal(N, 8)), BatchNormStack(blocks))


def test_work_of_a_batch_norm_stack_grows_with_its_depth() -> None:
    def calls(blocks: int) -> int:
        with allow_unsplit(), CallCounter() as counter:
            check(
                K.regression,
                (normal(N, 8), normal(N, 8)),
                BatchNormStack(blocks),
                sizes=(4,),
                magnitude=10.0,
            )
        return counter.calls

    calls(2)
    assert calls(20) <= 2.2 * calls(10)
