"""DQN in one file, in CleanRL's form; the one line more is marked.

python examples/integrations/cleanrl_dqn.py --total-timesteps 10000
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
from torch import nn

import koila_rl


@dataclass
class Args:
    seed: int = 1
    env_id: str = "CartPole-v1"
    total_timesteps: int = 10_000
    learning_rate: float = 2.5e-4
    buffer_size: int = 10_000
    gamma: float = 0.99
    target_network_frequency: int = 500
    batch_size: int = 128
    start_e: float = 1.0
    end_e: float = 0.05
    exploration_fraction: float = 0.5
    learning_starts: int = 1000
    train_frequency: int = 10
    width: int = 84
    lazy: bool = True
    memory: str | None = None
    microbatch: int | None = None


def network(observation: int, actions: int, width: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(observation, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(),
        nn.Linear(width, actions),
    )  # fmt: skip


def train(args: Args) -> tuple[nn.Module, list[float]]:
    """The Q-network, and the return of each finished episode."""
    random.seed(args.seed)
    np.random.seed(args.seed)  # noqa: NPY002
    torch.manual_seed(args.seed)
    env = gym.wrappers.RecordEpisodeStatistics(gym.make(args.env_id))
    env.action_space.seed(args.seed)
    sizes = (int(np.prod(env.observation_space.shape)), int(env.action_space.n), args.width)
    q_network, target_network = network(*sizes), network(*sizes)
    target_network.load_state_dict(q_network.state_dict())
    optimizer = torch.optim.Adam(q_network.parameters(), lr=args.learning_rate)
    rb = ReplayBuffer(args.buffer_size, env.observation_space, env.action_space, "cpu")
    curve: list[float] = []
    obs, _ = env.reset(seed=args.seed)
    for step in range(args.total_timesteps):
        progress = min(step / (args.exploration_fraction * args.total_timesteps), 1.0)
        if random.random() < args.start_e + progress * (args.end_e - args.start_e):
            action = env.action_space.sample()
        else:
            with torch.no_grad():
                action = q_network(torch.as_tensor(obs)).argmax().item()
        following, reward, terminated, truncated, info = env.step(action)
        rb.add(obs, following, np.array(action), reward, terminated, [info])
        obs = following
        if terminated or truncated:
            curve.append(float(info["episode"]["r"]))
            obs, _ = env.reset()
        if step < args.learning_starts:
            continue
        if step % args.train_frequency == 0:
            data = rb.sample(args.batch_size)
            if args.lazy:
                data = koila_rl.lazy(data)  # the one line
            with torch.no_grad():
                target_max, _ = target_network(data.next_observations).max(dim=1)
                alive = 1 - data.dones.flatten()
                td_target = data.rewards.flatten() + args.gamma * target_max * alive
            old_val = q_network(data.observations).gather(1, data.actions).squeeze()
            loss = F.mse_loss(td_target, old_val)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if step % args.target_network_frequency == 0:
            target_network.load_state_dict(q_network.state_dict())
    env.close()
    return q_network, curve


def main(args: Args) -> None:
    with koila_rl.limits(memory=args.memory, microbatch=args.microbatch):
        _, curve = train(args)
    print(f"{len(curve)} episodes; mean return of the last twenty {np.mean(curve[-20:]):.1f}")
    print(koila_rl.last_plan())


if __name__ == "__main__":
    main(tyro.cli(Args))
