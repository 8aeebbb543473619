"""The snippet of koila's README runs as printed there."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import CrossEntropyLoss, Flatten, Linear, Module, ReLU, Sequential

import koila_rl
from koila_rl import lazy
from tests.helpers import assert_close


class NeuralNetwork(Module):
    """A digit classifier, as in koila's README."""

    def __init__(self) -> None:
        super().__init__()
        self.flatten = Flatten()
        self.linear_relu_stack = Sequential(
            Linear(28 * 28, 512),
            ReLU(),
            Linear(512, 512),
            ReLU(),
            Linear(512, 10),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.flatten(x)
        logits: Tensor = self.linear_relu_stack(x)
        return logits


@pytest.mark.parametrize("microbatch", [None, 1, 3, 8])
def test_readme_snippet(microbatch: int | None) -> None:
    torch.manual_seed(0)
    input = torch.randn(8, 28, 28)  # noqa: A001  (as printed there)
    label = torch.randint(0, 10, [8])
    nn = NeuralNetwork()
    eager = CrossEntropyLoss()(nn(input), label)
    expected = torch.autograd.grad(eager, list(nn.parameters()))

    with koila_rl.limits(microbatch=microbatch):
        (input, label) = lazy(input, label, batch=0)  # noqa: A001
        loss_fn = CrossEntropyLoss()
        out = nn(input)
        loss = loss_fn(out, label)
        nn.zero_grad()
        loss.backward()

    assert out.shape == (8, 10)
    assert_close(torch.tensor(loss.item()), eager)
    for parameter, wanted in zip(nn.parameters(), expected, strict=True):
        assert parameter.grad is not None
        assert_close(parameter.grad, wanted)
