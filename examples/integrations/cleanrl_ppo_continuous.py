"""PPO for continuous actions in one file, in CleanRL's form; the one line more is marked.

python examples/integrations/cleanrl_ppo_continuous.py --total-timesteps 20000
"""

from __future__ import annotations

from dataclasses import dataclass

import gymnasium as gym
import numpy as np
import torch
import tyro
from gymnasium.vector import AutoresetMode
from torch import Tensor, nn
from torch.distributions import Normal

import koila_rl


@dataclass
class Args:
    seed: int = 1
    env_id: str = "Pendulum-v1"
    total_timesteps: int = 20_000
    learning_rate: float = 3e-4
    num_envs: int = 4
    num_steps: int = 256
    num_minibatches: int = 8
    update_epochs: int = 10
    gamma: float = 0.9
    gae_lambda: float = 0.95
    clip_coef: float = 0.2
    vf_coef: float = 0.5
    max_grad_norm: float = 0.5
    target_kl: float | None = None
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
    def __init__(self, observation: int, action: int, width: int) -> None:
        super().__init__()
        self.critic = nn.Sequential(
            layer(observation, width), nn.Tanh(), layer(width, width), nn.Tanh(),
            layer(width, 1, 1.0),
        )  # fmt: skip
        self.actor_mean = nn.Sequential(
            layer(observation, width), nn.Tanh(), layer(width, width), nn.Tanh(),
            layer(width, action, 0.01),
        )  # fmt: skip
        self.actor_logstd = nn.Parameter(torch.zeros(1, action))

    def get_action_and_value(
        self, x: Tensor, action: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        mean = self.actor_mean(x)
        probs = Normal(mean, self.actor_logstd.expand_as(mean).exp())
        action = probs.sample() if action is None else action
        log_prob, entropy = probs.log_prob(action).sum(1), probs.entropy().sum(1)
        return action, log_prob, entropy, self.critic(x).flatten()


def train(args: Args) -> tuple[nn.Module, list[float]]:
    """The agent, and the return of each finished episode."""
    np.random.seed(args.seed)  # noqa: NPY002
    torch.manual_seed(args.seed)
    envs = gym.make_vec(
        args.env_id, args.num_envs, vectorization_mode="sync",
        vector_kwargs={"autoreset_mode": AutoresetMode.SAME_STEP},
        wrappers=[gym.wrappers.ClipAction],
    )  # fmt: skip
    envs = gym.wrappers.vector.RecordEpisodeStatistics(envs)
    observation, action = (
        int(np.prod(space.shape))
        for space in (envs.single_observation_space, envs.single_action_space)
    )
    agent = Agent(observation, action, args.width)
    optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5)
    steps, n = args.num_steps, args.num_envs
    obs, actions = torch.zeros(steps, n, observation), torch.zeros(steps, n, action)
    logprobs, rewards, dones, values = torch.zeros(4, steps, n)
    curve: list[float] = []
    next_obs = torch.as_tensor(envs.reset(seed=args.seed)[0], dtype=torch.float32)
    next_done = torch.zeros(n)
    for _ in range(args.total_timesteps // (steps * n)):
        for t in range(steps):
            obs[t], dones[t] = next_obs, next_done
            with torch.no_grad():
                actions[t], logprobs[t], _, values[t] = agent.get_action_and_value(next_obs)
            seen, reward, term, trunc, info = envs.step(actions[t].numpy())
            rewards[t] = torch.as_tensor(reward / 10)
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
        flat = [obs, actions, logprobs, advantages, advantages + values]
        update(agent, optimizer, args, [x.flatten(0, 1) for x in flat])
    envs.close()
    return agent, curve


def update(
    agent: Agent, optimizer: torch.optim.Optimizer, args: Args, rollout: list[Tensor]
) -> None:
    for _ in range(args.update_epochs):
        for index in torch.randperm(len(rollout[0])).chunk(args.num_minibatches):
            minibatch = [x[index] for x in rollout]
            if args.lazy:
                minibatch = koila_rl.lazy(minibatch)  # the one line
            obs, action, old_logprob, advantage, target = minibatch
            _, logprob, _, value = agent.get_action_and_value(obs, action)
            logratio = logprob - old_logprob
            ratio = logratio.exp()
            with torch.no_grad():
                approx_kl = ((ratio - 1) - logratio).mean()
            advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
            clipped = torch.clamp(ratio, 1 - args.clip_coef, 1 + args.clip_coef)
            pg_loss = torch.max(-advantage * ratio, -advantage * clipped).mean()
            loss = pg_loss + args.vf_coef * 0.5 * ((value - target) ** 2).mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
            optimizer.step()
        if args.target_kl is not None and approx_kl > args.target_kl:
            break


def main(args: Args) -> None:
    with koila_rl.limits(memory=args.memory, microbatch=args.microbatch):
        _, curve = train(args)
    print(f"{len(curve)} episodes; mean return of the last twenty {np.mean(curve[-20:]):.1f}")
    print(koila_rl.last_plan())


if __name__ == "__main__":
    main(tyro.cli(Args))
