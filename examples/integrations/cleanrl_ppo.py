"""PPO in one file, in CleanRL's form; the one line more is marked.

python examples/integrations/cleanrl_ppo.py --total-timesteps 20000
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import gymnasium as gym
import numpy as np
import torch
import tyro
from gymnasium.vector import AutoresetMode
from torch import Tensor, nn
from torch.distributions import Categorical

import koila_rl


@dataclass
class Args:
    seed: int = 1
    env_id: str = "CartPole-v1"
    total_timesteps: int = 20_000
    learning_rate: float = 2.5e-4
    num_envs: int = 4
    num_steps: int = 128
    num_minibatches: int = 4
    update_epochs: int = 4
    gamma: float = 0.99
    gae_lambda: float = 0.95
    clip_coef: float = 0.2
    ent_coef: float = 0.01
    vf_coef: float = 0.5
    max_grad_norm: float = 0.5
    width: int = 64
    lazy: bool = True
    memory: str | None = None
    microbatch: int | None = None


def layer(inputs: int, outputs: int, std: float = 2**0.5) -> nn.Linear:
    linear = nn.Linear(inputs, outputs)
    nn.init.orthogonal_(linear.weight, std)
    nn.init.constant_(linear.bias, 0.0)
    return linear


class Agent(nn.Module):
    def __init__(self, observation: int, actions: int, width: int) -> None:
        super().__init__()
        self.critic = nn.Sequential(
            layer(observation, width), nn.Tanh(), layer(width, width), nn.Tanh(),
            layer(width, 1, 1.0),
        )  # fmt: skip
        self.actor = nn.Sequential(
            layer(observation, width), nn.Tanh(), layer(width, width), nn.Tanh(),
            layer(width, actions, 0.01),
        )  # fmt: skip

    def get_action_and_value(
        self, x: Tensor, action: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        probs = Categorical(logits=self.actor(x))
        action = probs.sample() if action is None else action
        return action, probs.log_prob(action), probs.entropy(), self.critic(x).flatten()


def train(args: Args) -> tuple[nn.Module, list[float]]:
    """The agent, and the return of each finished episode."""
    random.seed(args.seed)
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
    batch_size = steps * n
    for iteration in range(args.total_timesteps // batch_size):
        fraction = 1.0 - iteration / (args.total_timesteps // batch_size)
        optimizer.param_groups[0]["lr"] = fraction * args.learning_rate
        for t in range(steps):
            obs[t], dones[t] = next_obs, next_done
            with torch.no_grad():
                actions[t], logprobs[t], _, values[t] = agent.get_action_and_value(next_obs)
            seen, reward, term, trunc, info = envs.step(actions[t].numpy())
            rewards[t] = torch.as_tensor(reward)
            next_obs = torch.as_tensor(seen, dtype=torch.float32)
            next_done = torch.as_tensor(term | trunc, dtype=torch.float32)
            if "episode" in info:
                curve += [float(r) for r in info["episode"]["r"][info["_episode"]]]
        with torch.no_grad():
            next_value = agent.get_action_and_value(next_obs)[3]
        advantages, last = torch.zeros_like(rewards), torch.zeros(n)
        for t in reversed(range(steps)):
            alive = 1.0 - (next_done if t == steps - 1 else dones[t + 1])
            following = next_value if t == steps - 1 else values[t + 1]
            delta = rewards[t] + args.gamma * following * alive - values[t]
            advantages[t] = last = delta + args.gamma * args.gae_lambda * alive * last
        returns = advantages + values
        flat = [x.flatten(0, 1) for x in (obs, actions, logprobs, advantages, returns, values)]
        for _ in range(args.update_epochs):
            for index in torch.randperm(batch_size).chunk(args.num_minibatches):
                minibatch = [x[index] for x in flat]
                if args.lazy:
                    minibatch = koila_rl.lazy(minibatch)  # the one line
                loss = ppo_loss(agent, args, *minibatch)
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
                optimizer.step()
    envs.close()
    return agent, curve


def ppo_loss(
    agent: Agent, args: Args, obs: Tensor, action: Tensor, old_logprob: Tensor,
    advantage: Tensor, target: Tensor, old_value: Tensor,
) -> Tensor:  # fmt: skip
    _, logprob, entropy, value = agent.get_action_and_value(obs, action)
    ratio = (logprob - old_logprob).exp()
    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    clipped = torch.clamp(ratio, 1 - args.clip_coef, 1 + args.clip_coef)
    pg_loss = torch.max(-advantage * ratio, -advantage * clipped).mean()
    v_clipped = old_value + torch.clamp(value - old_value, -args.clip_coef, args.clip_coef)
    v_loss = 0.5 * torch.max((value - target) ** 2, (v_clipped - target) ** 2).mean()
    return pg_loss - args.ent_coef * entropy.mean() + args.vf_coef * v_loss


def main(args: Args) -> None:
    with koila_rl.limits(memory=args.memory, microbatch=args.microbatch):
        _, curve = train(args)
    print(f"{len(curve)} episodes; mean return of the last twenty {np.mean(curve[-20:]):.1f}")
    print(koila_rl.last_plan())


if __name__ == "__main__":
    main(tyro.cli(Args))
