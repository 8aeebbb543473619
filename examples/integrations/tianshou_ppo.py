"""PPO of Tianshou; the one line more is marked.

python examples/integrations/tianshou_ppo.py --epochs 5 --microbatch 200
"""

from __future__ import annotations

from dataclasses import dataclass

import gymnasium as gym
import numpy as np
import torch
import tyro
from tianshou.algorithm import PPO
from tianshou.algorithm.modelfree.reinforce import DiscreteActorPolicy
from tianshou.algorithm.optim import AdamOptimizerFactory
from tianshou.data import Collector, VectorReplayBuffer
from tianshou.env import DummyVectorEnv
from tianshou.utils.net.common import Net
from tianshou.utils.net.discrete import DiscreteActor, DiscreteCritic
from tianshou.utils.torch_utils import policy_within_training_step

import koila_rl


@dataclass
class Args:
    seed: int = 0
    env_id: str = "CartPole-v1"
    epochs: int = 5
    num_envs: int = 4
    steps: int = 2000
    minibatch: int = 500
    repeat: int = 5
    width: int = 64
    lazy: bool = True
    memory: str = "auto"
    microbatch: int | None = None


def train(args: Args) -> tuple[PPO, list[float]]:
    """The algorithm, and the mean return of each collection."""
    torch.manual_seed(args.seed)
    np.random.seed(args.seed)  # noqa: NPY002
    env = gym.make(args.env_id)
    envs = DummyVectorEnv([lambda: gym.make(args.env_id) for _ in range(args.num_envs)])
    envs.seed(args.seed)
    shape, actions = env.observation_space.shape, env.action_space
    actor = DiscreteActor(
        preprocess_net=Net(state_shape=shape, hidden_sizes=[args.width]), action_shape=actions.n
    )
    algorithm = PPO(
        policy=DiscreteActorPolicy(actor=actor, action_space=actions),
        critic=DiscreteCritic(
            preprocess_net=Net(state_shape=shape, hidden_sizes=[args.width])
        ),
        optim=AdamOptimizerFactory(lr=1e-3),
    )  # fmt: skip
    if args.lazy:
        koila_rl.integrations.tianshou.attach(algorithm, args.memory, args.microbatch)  # the line
    buffer = VectorReplayBuffer(args.steps + args.num_envs, args.num_envs)
    collector = Collector(algorithm, envs, buffer)
    collector.reset()
    curve = []
    for _ in range(args.epochs):
        with policy_within_training_step(algorithm.policy):
            stats = collector.collect(n_step=args.steps)
            algorithm.update(buffer=buffer, batch_size=args.minibatch, repeat=args.repeat)
        buffer.reset()
        curve.append(float(stats.returns.mean()))
    return algorithm, curve


def main(args: Args) -> None:
    _, curve = train(args)
    print(f"mean return {curve[0]:.1f} to {curve[-1]:.1f}")
    print(koila_rl.last_plan())


if __name__ == "__main__":
    main(tyro.cli(Args))
