"""PPO of skrl; the one line more is marked.

python examples/integrations/skrl_ppo.py --timesteps 5000 --microbatch 200
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import torch
import tyro
from skrl.agents.torch.ppo import PPO, PPO_CFG
from skrl.envs.wrappers.torch import wrap_env
from skrl.memories.torch import RandomMemory
from skrl.models.torch import CategoricalMixin, DeterministicMixin, Model
from skrl.trainers.torch import SequentialTrainer
from skrl.utils import set_seed
from torch import Tensor, nn

import koila_rl


@dataclass
class Args:
    seed: int = 0
    env_id: str = "CartPole-v1"
    timesteps: int = 5_000
    num_envs: int = 4
    rollouts: int = 256
    mini_batches: int = 2
    learning_epochs: int = 4
    width: int = 64
    lazy: bool = True
    memory: str = "auto"
    microbatch: int | None = None


class Policy(CategoricalMixin, Model):
    def __init__(self, width: int, **spaces: Any) -> None:
        Model.__init__(self, **spaces)
        CategoricalMixin.__init__(self)
        inputs, outputs = self.num_observations, self.num_actions
        self.net = nn.Sequential(nn.Linear(inputs, width), nn.Tanh(), nn.Linear(width, outputs))

    def compute(self, inputs: dict[str, Tensor], role: str) -> tuple[Tensor, dict[str, Any]]:
        return self.net(inputs["observations"]), {}


class Value(DeterministicMixin, Model):
    def __init__(self, width: int, **spaces: Any) -> None:
        Model.__init__(self, **spaces)
        DeterministicMixin.__init__(self)
        self.net = nn.Sequential(
            nn.Linear(self.num_observations, width), nn.Tanh(), nn.Linear(width, 1)
        )

    def compute(self, inputs: dict[str, Tensor], role: str) -> tuple[Tensor, dict[str, Any]]:
        return self.net(inputs["observations"]), {}


def train(args: Args) -> PPO:
    set_seed(args.seed)
    vector = gym.make_vec(args.env_id, args.num_envs, vectorization_mode="sync")
    env = wrap_env(vector)
    vector.reset(seed=args.seed)
    spaces = {
        "observation_space": env.observation_space,
        "action_space": env.action_space,
        "device": "cpu",
    }
    cfg = PPO_CFG(
        rollouts=args.rollouts, mini_batches=args.mini_batches,
        learning_epochs=args.learning_epochs,
    )  # fmt: skip
    cfg.experiment.write_interval = cfg.experiment.checkpoint_interval = 0
    agent = PPO(
        models={"policy": Policy(args.width, **spaces), "value": Value(args.width, **spaces)},
        memory=RandomMemory(memory_size=args.rollouts, num_envs=args.num_envs, device="cpu"),
        cfg=cfg, **spaces,
    )  # fmt: skip
    if args.lazy:
        koila_rl.integrations.skrl.attach(agent, args.memory, args.microbatch)  # the one line
    options = {"timesteps": args.timesteps, "headless": True, "disable_progressbar": True}
    SequentialTrainer(
        cfg={**options, "close_environment_at_exit": False}, env=env, agents=agent
    ).train()
    return agent


def main(args: Args) -> None:
    agent = train(args)
    norm = torch.cat([p.detach().flatten() for p in agent.policy.parameters()]).norm()
    print(f"trained; norm of the policy's parameters {norm:.3f}")
    print(koila_rl.last_plan())


if __name__ == "__main__":
    main(tyro.cli(Args))
