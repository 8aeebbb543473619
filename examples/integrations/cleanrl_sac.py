"""SAC in one file, in CleanRL's form; the one line more is marked.

python examples/integrations/cleanrl_sac.py --total-timesteps 5000
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import gymnasium as gym
import numpy as np
import torch
import torch.nn.functional as F
import tyro
from stable_baselines3.common.buffers import ReplayBuffer
from torch import Tensor, nn
from torch.distributions import Normal

import koila_rl


@dataclass
class Args:
    seed: int = 1
    env_id: str = "Pendulum-v1"
    total_timesteps: int = 5_000
    buffer_size: int = 10_000
    gamma: float = 0.99
    tau: float = 0.005
    batch_size: int = 256
    learning_starts: int = 1_000
    policy_lr: float = 3e-4
    q_lr: float = 1e-3
    policy_frequency: int = 2
    width: int = 64
    lazy: bool = True
    memory: str | None = None
    microbatch: int | None = None


class SoftQNetwork(nn.Module):
    def __init__(self, observation: int, action: int, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(observation + action, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(),
            nn.Linear(width, 1),
        )  # fmt: skip

    def forward(self, x: Tensor, a: Tensor) -> Tensor:
        q: Tensor = self.layers(torch.cat([x, a], 1)).flatten()
        return q


class Actor(nn.Module):
    def __init__(self, observation: int, action: int, width: int, scale: float) -> None:
        super().__init__()
        self.trunk = nn.Sequential(
            nn.Linear(observation, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()
        )
        self.mean, self.logstd = nn.Linear(width, action), nn.Linear(width, action)
        self.scale = scale

    def get_action(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.trunk(x)
        log_std = -5 + 0.5 * (2 + 5) * (torch.tanh(self.logstd(hidden)) + 1)
        normal = Normal(self.mean(hidden), log_std.exp())
        before = normal.rsample()
        squashed = torch.tanh(before)
        log_prob = normal.log_prob(before) - torch.log(self.scale * (1 - squashed.pow(2)) + 1e-6)
        return squashed * self.scale, log_prob.sum(1)


def train(args: Args) -> tuple[nn.Module, list[float]]:
    """Actor and critics in one module, and the return of each finished episode."""
    random.seed(args.seed)
    np.random.seed(args.seed)  # noqa: NPY002
    torch.manual_seed(args.seed)
    env = gym.wrappers.RecordEpisodeStatistics(gym.make(args.env_id))
    env.action_space.seed(args.seed)
    observation, action = (
        int(np.prod(space.shape)) for space in (env.observation_space, env.action_space)
    )
    actor = Actor(observation, action, args.width, float(env.action_space.high[0]))
    qfs, targets = (
        nn.ModuleList(SoftQNetwork(observation, action, args.width) for _ in range(2))
        for _ in range(2)
    )
    targets.load_state_dict(qfs.state_dict())
    log_alpha = torch.zeros(1, requires_grad=True)
    q_optimizer = torch.optim.Adam(qfs.parameters(), lr=args.q_lr)
    actor_optimizer = torch.optim.Adam(actor.parameters(), lr=args.policy_lr)
    a_optimizer = torch.optim.Adam([log_alpha], lr=args.q_lr)
    rb = ReplayBuffer(args.buffer_size, env.observation_space, env.action_space, "cpu")
    curve: list[float] = []
    obs, _ = env.reset(seed=args.seed)
    for step in range(args.total_timesteps):
        if step < args.learning_starts:
            act = env.action_space.sample()
        else:
            with torch.no_grad():
                act = actor.get_action(torch.as_tensor(obs)[None])[0][0].numpy()
        following, reward, terminated, truncated, info = env.step(act)
        rb.add(obs, following, act, reward, terminated, [info])
        obs = following
        if terminated or truncated:
            curve.append(float(info["episode"]["r"]))
            obs, _ = env.reset()
        if step <= args.learning_starts:
            continue
        data = rb.sample(args.batch_size)
        if args.lazy:
            data = koila_rl.lazy(data)  # the one line
        alpha = log_alpha.exp().item()
        with torch.no_grad():
            next_actions, next_log_pi = actor.get_action(data.next_observations)
            q1, q2 = (q(data.next_observations, next_actions) for q in targets)
            soft = torch.min(q1, q2) - alpha * next_log_pi
            target = data.rewards.flatten() + (1 - data.dones.flatten()) * args.gamma * soft
        q1, q2 = (q(data.observations, data.actions) for q in qfs)
        qf_loss = F.mse_loss(q1, target) + F.mse_loss(q2, target)
        q_optimizer.zero_grad()
        qf_loss.backward()
        q_optimizer.step()
        if step % args.policy_frequency == 0:
            for _ in range(args.policy_frequency):
                pi, log_pi = actor.get_action(data.observations)
                q1, q2 = (q(data.observations, pi) for q in qfs)
                actor_loss = (alpha * log_pi - torch.min(q1, q2)).mean()
                actor_optimizer.zero_grad()
                actor_loss.backward()
                actor_optimizer.step()
                with torch.no_grad():
                    _, log_pi = actor.get_action(data.observations)
                alpha_loss = (-log_alpha.exp() * (log_pi - action)).mean()
                a_optimizer.zero_grad()
                alpha_loss.backward()
                a_optimizer.step()
                alpha = log_alpha.exp().item()
        with torch.no_grad():
            for q, t in zip(qfs.parameters(), targets.parameters(), strict=True):
                t.lerp_(q, args.tau)
    env.close()
    return nn.ModuleList([actor, qfs]), curve


def main(args: Args) -> None:
    with koila_rl.limits(memory=args.memory, microbatch=args.microbatch):
        _, curve = train(args)
    print(f"{len(curve)} episodes; mean return of the last three {np.mean(curve[-3:]):.1f}")
    print(koila_rl.last_plan())


if __name__ == "__main__":
    main(tyro.cli(Args))
