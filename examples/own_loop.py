"""A PPO loop of one's own, made memory-safe by the line marked below.

    python examples/own_loop.py [UPDATES]

Everything else is plain PyTorch and gymnasium: the minibatch is the whole rollout, and it runs in
as many microbatches as `koila_rl.limits` (or the device) asks for, with the same gradient.
"""

from __future__ import annotations

import sys

import gymnasium as gym
import torch
from torch import nn
from torch.distributions import Categorical

import koila_rl


def main(updates: int = 40, steps: int = 64, n_envs: int = 8, gamma: float = 0.98) -> float:
    """Learn CartPole for a while; returns the mean length of the last episodes."""
    torch.manual_seed(0)
    mode = {"autoreset_mode": gym.vector.AutoresetMode.SAME_STEP}
    envs = gym.make_vec("CartPole-v1", n_envs, "sync", vector_kwargs=mode)
    actor = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 2))
    critic = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = torch.optim.Adam([*actor.parameters(), *critic.parameters()], lr=3e-3)
    observation, _ = envs.reset(seed=0)
    length, lengths = torch.zeros(n_envs), []
    for _ in range(updates):
        rows = []
        for _ in range(steps):
            obs = torch.tensor(observation)
            with torch.no_grad():
                policy = Categorical(logits=actor(obs))
                action = policy.sample()
                log_prob = policy.log_prob(action)
            observation, rewards, terminated, truncated, info = envs.step(action.numpy())
            reward, ended = torch.tensor(rewards).float(), torch.tensor(terminated | truncated)
            for i in truncated.nonzero()[0]:  # cut off by the time limit: its value goes on
                reward[i] += gamma * critic(torch.tensor(info["final_obs"][i])).item()
            length += 1
            lengths += length[ended].tolist()
            length[ended] = 0
            rows.append((obs, action, log_prob, reward, ended))
        running, returns = critic(torch.tensor(observation)).detach().squeeze(-1), []
        for *_, reward, ended in reversed(rows):
            running = reward + gamma * running * ~ended
            returns.insert(0, running)
        obs, action, old, *_ = (torch.cat(column) for column in zip(*rows, strict=True))
        batch = (obs, action, old, torch.cat(returns))

        batch = koila_rl.lazy(*batch)  # the one line

        for _ in range(10):
            obs, action, old, target = batch
            policy, value = Categorical(logits=actor(obs)), critic(obs).squeeze(-1)
            advantage = target - value.detach()
            advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
            ratio = (policy.log_prob(action) - old).exp()
            surrogate = torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
            loss = -surrogate.mean() + 0.01 * (value - target).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    recent = lengths[-50:]
    return sum(recent) / len(recent)


if __name__ == "__main__":
    with koila_rl.limits(memory="512KiB"):
        print(f"mean length of the last episodes: {main(*map(int, sys.argv[1:])):.0f}")
    print(koila_rl.last_plan())
