"""PPO in TorchRL's form; the one line more is marked.

python examples/integrations/torchrl_ppo.py --total-frames 20000 --microbatch 50
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import tyro
from tensordict.nn import TensorDictModule
from torch import nn
from torch.distributions import Categorical
from torchrl.collectors import Collector
from torchrl.data import LazyTensorStorage, ReplayBuffer, SamplerWithoutReplacement
from torchrl.envs import GymEnv, InitTracker, RewardSum, TransformedEnv
from torchrl.modules import MLP, ProbabilisticActor, ValueOperator
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE

import koila_rl


@dataclass
class Args:
    seed: int = 0
    env: str = "CartPole-v1"
    total_frames: int = 20_000
    frames_per_batch: int = 1_000
    minibatch: int = 250
    epochs: int = 5
    lr: float = 1e-3
    gamma: float = 0.99
    lmbda: float = 0.95
    width: int = 64
    lazy: bool = True
    memory: str | None = None
    microbatch: int | None = None


def train(args: Args) -> tuple[nn.Module, list[float]]:
    """Policy and critic in one module, and the return of each finished episode."""
    torch.manual_seed(args.seed)
    env = TransformedEnv(GymEnv(args.env, categorical_action_encoding=True))
    env.append_transform(InitTracker())
    env.append_transform(RewardSum())
    env.set_seed(args.seed)
    inputs, actions = env.observation_spec["observation"].shape[-1], env.action_spec.n
    cells = [args.width, args.width]
    actor = ProbabilisticActor(
        TensorDictModule(
            MLP(inputs, actions, num_cells=cells), in_keys=["observation"], out_keys=["logits"]
        ),
        in_keys=["logits"], distribution_class=Categorical, return_log_prob=True,
        spec=env.action_spec,
    )  # fmt: skip
    critic = ValueOperator(MLP(inputs, 1, num_cells=cells), in_keys=["observation"])
    advantage = GAE(gamma=args.gamma, lmbda=args.lmbda, value_network=critic, average_gae=True)
    loss_module = ClipPPOLoss(actor, critic, entropy_coeff=0.01)
    optimizer = torch.optim.Adam(loss_module.parameters(), lr=args.lr)
    buffer = ReplayBuffer(
        storage=LazyTensorStorage(args.frames_per_batch), sampler=SamplerWithoutReplacement(),
        batch_size=args.minibatch,
    )  # fmt: skip
    if args.lazy:
        sampled = koila_rl.wrap(buffer)  # the one line
    else:
        sampled = buffer
    collector = Collector(
        env, actor, frames_per_batch=args.frames_per_batch, total_frames=args.total_frames
    )
    curve: list[float] = []
    for data in collector:
        over = data["next", "done"].squeeze(-1)
        curve += data["next", "episode_reward"].squeeze(-1)[over].tolist()
        for _ in range(args.epochs):
            with torch.no_grad():
                advantage(data)
            buffer.empty()
            buffer.extend(data.reshape(-1))
            for _ in range(args.frames_per_batch // args.minibatch):
                losses = loss_module(sampled.sample())
                loss = losses["loss_objective"] + losses["loss_critic"] + losses["loss_entropy"]
                loss.backward()
                nn.utils.clip_grad_norm_(loss_module.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
    collector.shutdown()
    return loss_module, curve


def main(args: Args) -> None:
    with koila_rl.limits(memory=args.memory, microbatch=args.microbatch):
        _, curve = train(args)
    late = curve[-20:]
    print(f"{len(curve)} episodes; mean return of the last twenty {sum(late) / len(late):.1f}")
    print(koila_rl.last_plan())


if __name__ == "__main__":
    main(tyro.cli(Args))
