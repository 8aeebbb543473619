"""Categorical DQN in one file, in CleanRL's form; the one line more is marked.

python examples/integrations/cleanrl_c51.py --total-timesteps 10000
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import gymnasium as gym
import numpy as np
import torch
import tyro
from stable_baselines3.common.buffers import ReplayBuffer
from torch import Tensor, nn

import koila_rl


@dataclass
class Args:
    seed: int = 1
    env_id: str = "CartPole-v1"
    total_timesteps: int = 10_000
    learning_rate: float = 2.5e-4
    n_atoms: int = 51
    v_min: float = 0.0
    v_max: float = 100.0
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


class QNetwork(nn.Module):
    def __init__(self, observation: int, actions: int, args: Args) -> None:
        super().__init__()
        self.register_buffer("atoms", torch.linspace(args.v_min, args.v_max, args.n_atoms))
        self.shape = (actions, args.n_atoms)
        self.network = nn.Sequential(
            nn.Linear(observation, args.width), nn.ReLU(),
            nn.Linear(args.width, args.width), nn.ReLU(),
            nn.Linear(args.width, actions * args.n_atoms),
        )  # fmt: skip

    def get_action(self, x: Tensor, action: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Actions, the greedy ones if none are given, and the distribution of their return."""
        logits = self.network(x).view(x.shape[0], *self.shape)
        pmfs = torch.softmax(logits, dim=2)
        if action is None:
            action = (pmfs * self.atoms).sum(2).argmax(1)
        index = action.view(-1, 1, 1).expand(-1, 1, self.shape[1])
        return action, pmfs.gather(1, index).squeeze(1)


def projected(q: QNetwork, args: Args, rewards: Tensor, dones: Tensor, pmfs: Tensor) -> Tensor:
    """The distribution of r + γ z on the atoms: Bellemare et al. 2017, algorithm 1."""
    delta_z = q.atoms[1] - q.atoms[0]
    target = (rewards + args.gamma * q.atoms * (1 - dones)).clamp(args.v_min, args.v_max)
    b = (target - args.v_min) / delta_z
    low = b.floor().clamp(0, args.n_atoms - 1)
    high = b.ceil().clamp(0, args.n_atoms - 1)
    below = (high + (low == high).float() - b) * pmfs
    above = (b - low) * pmfs
    result = torch.zeros_like(pmfs).scatter_add(1, low.long(), below)
    return result.scatter_add(1, high.long(), above)


def train(args: Args) -> tuple[nn.Module, list[float]]:
    """The Q-network, and the return of each finished episode."""
    random.seed(args.seed)
    np.random.seed(args.seed)  # noqa: NPY002
    torch.manual_seed(args.seed)
    env = gym.wrappers.RecordEpisodeStatistics(gym.make(args.env_id))
    env.action_space.seed(args.seed)
    sizes = (int(np.prod(env.observation_space.shape)), int(env.action_space.n), args)
    q_network, target_network = QNetwork(*sizes), QNetwork(*sizes)
    target_network.load_state_dict(q_network.state_dict())
    optimizer = torch.optim.Adam(
        q_network.parameters(), lr=args.learning_rate, eps=0.01 / args.batch_size
    )
    rb = ReplayBuffer(args.buffer_size, env.observation_space, env.action_space, "cpu")
    curve: list[float] = []
    obs, _ = env.reset(seed=args.seed)
    for step in range(args.total_timesteps):
        progress = min(step / (args.exploration_fraction * args.total_timesteps), 1.0)
        if random.random() < args.start_e + progress * (args.end_e - args.start_e):
            action = env.action_space.sample()
        else:
            with torch.no_grad():
                action = q_network.get_action(torch.as_tensor(obs)[None])[0].item()
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
                _, next_pmfs = target_network.get_action(data.next_observations)
                target_pmfs = projected(q_network, args, data.rewards, data.dones, next_pmfs)
            _, old_pmfs = q_network.get_action(data.observations, data.actions.flatten())
            loss = (-(target_pmfs * old_pmfs.clamp(1e-5, 1 - 1e-5).log()).sum(-1)).mean()
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
