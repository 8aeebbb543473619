"""PPO with an LSTM in one file, in CleanRL's form; the one line more is marked.

A minibatch is a few environments with all their steps, ``[steps, environments]``: its samples are
environments, so they lie along dimension 1.

python examples/integrations/cleanrl_ppo_lstm.py --total-timesteps 20000
"""

from __future__ import annotations

from dataclasses import dataclass

import gymnasium as gym
import numpy as np
import torch
import tyro
from gymnasium.vector import AutoresetMode
from torch import Tensor, nn
from torch.distributions import Categorical

import koila_rl

State = tuple[Tensor, Tensor]


@dataclass
class Args:
    seed: int = 1
    env_id: str = "CartPole-v1"
    total_timesteps: int = 20_000
    learning_rate: float = 1e-3
    num_envs: int = 8
    num_steps: int = 64
    num_minibatches: int = 2
    update_epochs: int = 4
    gamma: float = 0.99
    gae_lambda: float = 0.95
    clip_coef: float = 0.2
    ent_coef: float = 0.01
    vf_coef: float = 0.5
    max_grad_norm: float = 0.5
    width: int = 32
    lazy: bool = True
    memory: str | None = None
    microbatch: int | None = None


class Agent(nn.Module):
    def __init__(self, observation: int, actions: int, width: int) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Linear(observation, width), nn.Tanh())
        self.lstm = nn.LSTM(width, width)
        self.actor = nn.Linear(width, actions)
        self.critic = nn.Linear(width, 1)

    def get_states(self, x: Tensor, state: State, done: Tensor) -> tuple[Tensor, State]:
        """Features ``[steps, environments, width]``; the state is reset where an episode began."""
        hidden = []
        for h, d in zip(self.network(x), done, strict=True):
            kept = (1.0 - d).view(1, -1, 1)
            out, state = self.lstm(h.unsqueeze(0), (kept * state[0], kept * state[1]))
            hidden.append(out)
        return torch.cat(hidden), state

    def get_action_and_value(
        self, x: Tensor, state: State, done: Tensor, action: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, State]:
        hidden, state = self.get_states(x, state, done)
        probs = Categorical(logits=self.actor(hidden))
        action = probs.sample() if action is None else action
        value = self.critic(hidden).squeeze(-1)
        return action, probs.log_prob(action), probs.entropy(), value, state


def train(args: Args) -> tuple[nn.Module, list[float]]:
    """The agent, and the return of each finished episode."""
    np.random.seed(args.seed)  # noqa: NPY002
    torch.manual_seed(args.seed)
    envs = gym.make_vec(
        args.env_id, args.num_envs, vectorization_mode="sync",
        vector_kwargs={"autoreset_mode": AutoresetMode.SAME_STEP},
    )  # fmt: skip
    envs = gym.wrappers.vector.RecordEpisodeStatistics(envs)
    observations = int(np.prod(envs.single_observation_space.shape))
    agent = Agent(observations, int(envs.single_action_space.n), args.width)
    optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5)
    steps, n = args.num_steps, args.num_envs
    obs = torch.zeros(steps, n, observations)
    actions = torch.zeros(steps, n, dtype=torch.int64)
    logprobs, rewards, dones, values = torch.zeros(4, steps, n)
    curve: list[float] = []
    next_obs = torch.as_tensor(envs.reset(seed=args.seed)[0], dtype=torch.float32)
    next_done = torch.zeros(n)
    state: State = (torch.zeros(1, n, args.width), torch.zeros(1, n, args.width))
    for _ in range(args.total_timesteps // (steps * n)):
        first = state
        for t in range(steps):
            obs[t], dones[t] = next_obs, next_done
            with torch.no_grad():
                found = agent.get_action_and_value(next_obs[None], state, next_done[None])
            (actions[t],), (logprobs[t],), _, (values[t],), state = found
            seen, reward, term, trunc, info = envs.step(actions[t].numpy())
            rewards[t] = torch.as_tensor(reward)
            next_obs = torch.as_tensor(seen, dtype=torch.float32)
            next_done = torch.as_tensor(term | trunc, dtype=torch.float32)
            if "episode" in info:
                curve += [float(r) for r in info["episode"]["r"][info["_episode"]]]
        with torch.no_grad():
            next_value = agent.get_action_and_value(next_obs[None], state, next_done[None])[3][0]
        advantages, last = torch.zeros_like(rewards), torch.zeros(n)
        for t in reversed(range(steps)):
            alive = 1.0 - (next_done if t == steps - 1 else dones[t + 1])
            following = next_value if t == steps - 1 else values[t + 1]
            delta = rewards[t] + args.gamma * following * alive - values[t]
            advantages[t] = last = delta + args.gamma * args.gae_lambda * alive * last
        rollout = [obs, dones, actions, logprobs, advantages, advantages + values, *first]
        update(agent, optimizer, args, rollout)
    envs.close()
    return agent, curve


def update(
    agent: Agent, optimizer: torch.optim.Optimizer, args: Args, rollout: list[Tensor]
) -> None:
    for _ in range(args.update_epochs):
        for index in torch.randperm(args.num_envs).chunk(args.num_minibatches):
            minibatch = [x[:, index] for x in rollout]
            if args.lazy:
                minibatch = koila_rl.lazy(minibatch, batch=1)  # the one line
            obs, done, action, old_logprob, advantage, target, h, c = minibatch
            _, logprob, entropy, value, _ = agent.get_action_and_value(obs, (h, c), done, action)
            ratio = (logprob - old_logprob).exp()
            advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
            clipped = torch.clamp(ratio, 1 - args.clip_coef, 1 + args.clip_coef)
            pg_loss = torch.max(-advantage * ratio, -advantage * clipped).mean()
            v_loss = 0.5 * ((value - target) ** 2).mean()
            loss = pg_loss - args.ent_coef * entropy.mean() + args.vf_coef * v_loss
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
            optimizer.step()


def main(args: Args) -> None:
    with koila_rl.limits(memory=args.memory, microbatch=args.microbatch):
        _, curve = train(args)
    print(f"{len(curve)} episodes; mean return of the last twenty {np.mean(curve[-20:]):.1f}")
    print(koila_rl.last_plan())


if __name__ == "__main__":
    main(tyro.cli(Args))
