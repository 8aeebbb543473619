"""Updates stay within ``limits(memory=...)``, and say so when they cannot."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Categorical, Distribution

import koila_rl
from tests.engine.losses import transitions
from tests.engine.networks import NatureCNN, integers, mlp, normal
from tests.engine.test_ppo_dqn import ActorCritic, ppo, rollout
from tests.helpers import LiveStorages, allow_unsplit, assert_close

N = 256


class Separate(ActorCritic):
    """Policy and critic without a shared trunk.

    Where a trunk is shared autograd adds two gradients in place, but out of place while a
    dispatch mode watches, so the judge would see bytes that are not there otherwise.
    """

    def __init__(self) -> None:
        super().__init__(continuous=False)
        self.critic = nn.Sequential(nn.Linear(5, 17), nn.Tanh(), nn.Linear(17, 1))

    def forward(self, observation: Tensor) -> tuple[Distribution, Tensor]:
        logits = self.policy(torch.tanh(self.trunk(observation)))
        return Categorical(logits=logits), self.critic(observation).squeeze(-1)


def cnn_batch() -> tuple[Tensor, ...]:
    return integers(256, N, 2, 44, 44).to(torch.uint8), normal(N, 4)


def regression(module: Any, x: Tensor, target: Tensor) -> Tensor:
    return F.smooth_l1_loss(module(x), target)


def ppo_loss(module: Any, *batch: Tensor) -> Tensor:
    return ppo(module, *batch)[0]


def peak_of(module: nn.Module, program: Any, batch: tuple[Tensor, ...]) -> int:
    module.zero_grad()
    with LiveStorages() as tracker:
        program(module, *batch).backward()
    return tracker.peak


CASES = {
    "CNN": (NatureCNN, regression, cnn_batch),
    "MLP": (mlp, regression, lambda: (normal(4 * N, 24), normal(4 * N, 4))),
    "PPO": (Separate, ppo_loss, lambda: rollout(False, 4 * N)),
}


@pytest.mark.parametrize("share", [2, 4])
@pytest.mark.parametrize("name", CASES)
def test_the_peak_stays_within_the_budget(name: str, share: int) -> None:
    build, program, make = CASES[name]
    torch.manual_seed(0)
    module, batch = build(), make()
    if name != "CNN":  # Images over 255.0 are float32.
        module = module.double()
        batch = tuple(t.double() if t.is_floating_point() else t for t in batch)
    peak_of(module, program, batch)
    budget = peak_of(module, program, batch) // share
    expected = [p.grad for p in module.parameters()]
    with koila_rl.limits(memory=budget), allow_unsplit():
        for _ in range(2):
            peak = peak_of(module, program, koila_rl.lazy(*batch))
        plan = koila_rl.last_plan()
    assert peak <= budget
    assert plan is not None
    assert plan.peak_bytes <= plan.budget_bytes == budget
    assert max(p.microbatch_size for p in plan.passes) < plan.batch_size
    for parameter, wanted in zip(module.parameters(), expected, strict=True):
        assert (parameter.grad is None) == (wanted is None)
        if parameter.grad is not None and wanted is not None:
            assert_close(parameter.grad, wanted, name, magnitude=1.0)


def test_a_minibatch_that_fits_runs_whole() -> None:
    with koila_rl.limits(memory="1GiB"):
        mlp()(koila_rl.lazy(normal(N, 24))).mean().backward()
    plan = koila_rl.last_plan()
    assert plan is not None
    assert [p.microbatch_size for p in plan.passes] == [N]


def test_a_budget_too_small_for_one_sample_is_refused_before_anything_changes() -> None:
    module = NatureCNN()
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    images, target = cnn_batch()
    state = torch.get_rng_state()

    def update() -> None:
        with koila_rl.limits(memory="4KiB"):
            regression(module, *koila_rl.lazy(images, target)).backward()

    with pytest.raises(koila_rl.InsufficientMemoryError) as caught:
        update()
    assert "4" in str(caught.value)
    assert "KiB" in str(caught.value)
    assert "conv" in str(caught.value)
    assert all(bool((p.grad == 1).all()) for p in module.parameters() if p.grad is not None)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_call_that_needs_the_whole_minibatch_is_named_where_it_does_not_fit() -> None:
    observation = transitions(64 * N)[0]
    layer = nn.Linear(8, 256)

    def update() -> None:
        with koila_rl.limits(memory="2MiB"), allow_unsplit():
            layer(koila_rl.lazy(observation)).sort(0).values.pow(2).mean().backward()

    with pytest.raises(koila_rl.InsufficientMemoryError, match="sort"):
        update()
    assert layer.weight.grad is None


@pytest.mark.parametrize("value", ["lots", "-1GiB", 0, -5, "1.5.2GiB"])
def test_a_budget_that_makes_no_sense_is_refused(value: Any) -> None:
    with pytest.raises(koila_rl.ConfigurationError):
        koila_rl.limits(memory=value).__enter__()


@pytest.mark.parametrize("value", [0, -1, 2.5, "4"])
def test_a_microbatch_that_makes_no_sense_is_refused(value: Any) -> None:
    with pytest.raises(koila_rl.ConfigurationError):
        koila_rl.limits(microbatch=value).__enter__()
