"""One PPO minibatch of thousands of pictures, in a few MiB.

    python examples/huge_minibatch.py [SAMPLES]

The rollout is made up: it is the update that counts. The whole minibatch is one loss and one
optimizer step; limits says what it may take above what is there already, and the plan says how
that came about. The gradient is that of the whole, which a second, tighter run shows.
"""

from __future__ import annotations

import sys

import torch
from tensordict import TensorDict
from torch import Tensor

import koila_rl
from koila_rl.agents.encoders import NatureCNN

PICTURE = (4, 84, 84)


def rollout_of(samples: int, n_envs: int = 64) -> koila_rl.RolloutBuffer:
    """Random uint8 pictures, actions, advantages and value targets ``[samples / 64, 64]``."""
    n_steps, generator = samples // n_envs, torch.Generator().manual_seed(0)
    rollout = koila_rl.RolloutBuffer(n_steps, n_envs, seed=0)
    for _ in range(n_steps):
        step = {
            "observation": torch.randint(
                256, (n_envs, *PICTURE), dtype=torch.uint8, generator=generator
            ),
            "action": torch.randint(6, (n_envs,), generator=generator),
            "action_log_prob": torch.full((n_envs,), -1.8),
            "advantage": torch.randn(n_envs, generator=generator),
            "value_target": torch.randn(n_envs, generator=generator),
        }
        rollout.add(TensorDict(step, [n_envs]))
    return rollout


def gradient(rollout: koila_rl.RolloutBuffer, samples: int, memory: str) -> Tensor:
    """The gradient of PPO's loss over one minibatch of the whole rollout."""
    torch.manual_seed(0)
    trunk = NatureCNN(PICTURE)
    actor, critic = torch.nn.Linear(512, 6), torch.nn.Linear(512, 1)
    (minibatch,) = rollout.minibatches(samples)
    features = trunk(minibatch["observation"])
    log_probs = actor(features).log_softmax(-1)
    log_prob = log_probs.gather(-1, minibatch["action"].unsqueeze(-1)).squeeze(-1)
    ratio = (log_prob - minibatch["action_log_prob"]).exp()
    advantage = minibatch["advantage"]
    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    surrogate = torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
    value_loss = (critic(features).squeeze(-1) - minibatch["value_target"]).square().mean()
    entropy = -(log_probs.exp() * log_probs).sum(-1).mean()
    with koila_rl.limits(memory=memory):
        (0.5 * value_loss - surrogate - 0.01 * entropy).backward()
        print(koila_rl.last_plan(), end="\n\n")
    parameters = [*trunk.parameters(), *actor.parameters(), *critic.parameters()]
    return torch.cat([p.grad.flatten() for p in parameters if p.grad is not None])


def main(samples: int = 4096) -> None:
    """Twice the same minibatch, with a budget and with half of it."""
    rollout = rollout_of(samples)
    stored = rollout.nbytes / 2**20
    print(f"{len(rollout) * rollout.n_envs:,} samples, {stored:.0f} MiB as bytes\n")
    first, second = gradient(rollout, samples, "128MiB"), gradient(rollout, samples, "64MiB")
    print(f"largest difference {float((first - second).abs().max()):.1e}, "
          f"largest gradient {float(first.abs().max()):.1e}")  # fmt: skip


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
