"""``torch.compile`` around or inside a lazy program: eager's value and gradient."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import koila_rl
from tests.helpers import check

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning:torch"),
]

BACKEND = "aot_eager"


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def test_a_compiled_loss() -> None:
    def loss_fn(x: Tensor) -> Tensor:
        return ((x - x.mean(0)).tanh() * x).pow(2).mean()

    compiled = torch.compile(loss_fn, backend=BACKEND)
    check(lambda module, x: compiled(x), (torch.randn(7, 3, requires_grad=True),), sizes=(2, 7))


def test_a_compiled_model() -> None:
    def program(module: Any, x: Tensor) -> Tensor:
        return torch.compile(module, backend=BACKEND)(x).pow(2).mean()

    module = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    check(program, (torch.randn(7, 3),), module, sizes=(2, 7))


def test_a_full_graph_is_refused_by_name() -> None:
    compiled = torch.compile(lambda x: x * 2, backend=BACKEND, fullgraph=True)
    with pytest.raises(Exception, match=r"opaque|fullgraph|lazy"):
        koila_rl.materialize(compiled(koila_rl.lazy(torch.randn(7, 3))))
