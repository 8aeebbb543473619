"""A minibatch larger than the device, drawn from files: as a loop written by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import koila_rl
from koila_rl import RolloutBuffer, SimulatedDevice
from koila_rl.memory.tracking import StorageTracker

N_STEPS, N_ENVS, BUDGET = 32, 8, 5 * 2**20


class Policy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Conv2d(3, 8, 8, stride=8), nn.ReLU(), nn.Flatten())
        self.actor, self.critic = nn.Linear(512, 4), nn.Linear(512, 1)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        features = self.trunk(images.double() / 255)
        return self.actor(features), self.critic(features).squeeze(-1)


def terms(policy: Policy, part: Any, advantage: Tensor) -> Tensor:
    logits, value = policy(part["observation"])
    log_prob = logits.log_softmax(-1).gather(-1, part["action"][:, None]).squeeze(-1)
    ratio = (log_prob - part["action_log_prob"]).exp()
    surrogate = torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
    return 0.5 * (value - part["value_target"]).pow(2) - surrogate


def normalised(advantage: Tensor) -> Tensor:
    return (advantage - advantage.mean()) / (advantage.std() + 1e-8)


def gradients(policy: Policy) -> list[Tensor]:
    return [p.grad.clone() for p in policy.parameters() if p.grad is not None]


def filled(place: Path) -> RolloutBuffer:
    rollout = RolloutBuffer(N_STEPS, N_ENVS, seed=0, storage=place)
    generator = torch.Generator().manual_seed(0)
    for _ in range(N_STEPS):
        images = torch.randint(0, 256, (N_ENVS, 3, 64, 64), dtype=torch.uint8, generator=generator)
        normal = torch.randn(3, N_ENVS, generator=generator, dtype=torch.float64)
        rollout.add(
            {
                "observation": images,
                "action": torch.randint(0, 4, (N_ENVS,), generator=generator),
                "action_log_prob": -normal[0].abs() - 1,
                "advantage": normal[1],
                "value_target": normal[2],
            }
        )
    return rollout


@pytest.mark.parametrize("where", ["limits", "simulated device"])
def test_one_minibatch_of_a_whole_rollout_in_files(where: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    policy, rollout = Policy().double(), filled(tmp_path / "rollout")
    data, advantage = rollout.data.flatten(), normalised(rollout.data["advantage"].flatten())
    for start in range(0, len(data), 128):
        rows = slice(start, start + 128)
        (terms(policy, data[rows], advantage[rows]).sum() / len(data)).backward()
    expected = gradients(policy)
    policy.zero_grad()
    if where == "limits":
        with koila_rl.limits(memory=BUDGET), StorageTracker(follow_fake=False) as tracked:
            update(policy, rollout)
        peak = tracked.peak_bytes
    else:
        with SimulatedDevice(BUDGET).register(policy) as device:
            update(policy, rollout)
        peak = device.peak_bytes
    plan = koila_rl.last_plan()
    assert plan is not None
    assert plan.split
    assert plan.retries == 0
    assert peak <= BUDGET
    assert peak > BUDGET // 2  # not by microbatches smaller than need be
    for ours, theirs in zip(gradients(policy), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def update(policy: Policy, rollout: RolloutBuffer) -> None:
    (part,) = rollout.minibatches(N_STEPS * N_ENVS)
    terms(policy, part, normalised(part["advantage"])).mean().backward()
