"""Cases that others met, with memory."""

from __future__ import annotations

import pytest
import torch
from gymnasium import spaces
from tensordict import TensorDict
from torch import Tensor, nn

import koila_rl
from koila_rl.agents.networks import ActorCritic
from koila_rl.memory.simulated import SimulatedDevice

MIB = 1 << 20


def test_observations_of_a_device_leave_it_flat_when_a_buffer_takes_them() -> None:
    buffer = koila_rl.ReplayBuffer(256, seed=0)
    with SimulatedDevice("2MiB") as device:
        seen = []
        for _ in range(1000):
            observation = torch.ones(8, 64)
            buffer.extend(TensorDict({"observation": observation}, batch_size=[8]))
            del observation
            seen.append(device.live_bytes)
    assert len(set(seen[100:])) == 1


def image_loss(network: nn.Module, n: int) -> Tensor:
    images = torch.zeros(1, 3, 64, 64, dtype=torch.uint8).expand(n, 3, 64, 64)
    advantage, action = torch.linspace(-1, 1, n), torch.zeros(n, dtype=torch.int64)
    images, advantage, action = koila_rl.lazy(images, advantage, action)
    distribution, value = network(images)
    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    ratio = (distribution.log_prob(action) - distribution.log_prob(action).detach()).exp()
    clipped = ratio.clamp(0.8, 1.2)
    loss: Tensor = -torch.min(ratio * advantage, clipped * advantage).mean() + value.pow(2).mean()
    return loss


def network() -> ActorCritic:
    torch.manual_seed(0)
    return ActorCritic(
        spaces.Box(0, 255, (3, 64, 64), "uint8"), spaces.Discrete(4), net_arch=(), share_trunk=True
    )


def test_a_minibatch_of_32768_images_is_planned_within_its_budget() -> None:
    with koila_rl.limits(memory="1GiB"):
        plan = koila_rl.plan(image_loss(network(), 32_768))
    assert plan.split
    assert 512 * MIB < plan.peak_bytes <= 1024 * MIB
    assert plan.unsplit == () or set(plan.unsplit) == {"std"}


@pytest.mark.slow
def test_a_minibatch_of_32768_images_trains_within_a_gibibyte() -> None:
    module = network()
    with SimulatedDevice("1GiB").register(module) as device:
        image_loss(module, 32_768).backward()
    plan = koila_rl.last_plan()
    assert plan is not None
    assert plan.split
    assert plan.retries == 0
    assert device.peak_bytes <= 1024 * MIB


def test_values_of_a_whole_rollout_run_in_microbatches() -> None:
    module, rollout = nn.Linear(64, 512), torch.ones(128, 64, 64)
    with koila_rl.limits(memory="8MiB"), torch.no_grad():
        values = module(koila_rl.lazy(rollout.flatten(0, 1))).pow(2).sum(-1)
        real = koila_rl.materialize(values)
    plan = koila_rl.last_plan()
    assert plan is not None
    assert plan.split
    assert plan.peak_bytes <= 8 * MIB
    with torch.no_grad():
        assert torch.allclose(real, module(rollout.flatten(0, 1)).pow(2).sum(-1))
