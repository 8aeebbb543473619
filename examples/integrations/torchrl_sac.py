"""SAC in TorchRL's form; the one line more is marked.

python examples/integrations/torchrl_sac.py --total-frames 4000 --microbatch 100
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import tyro
from tensordict.nn import NormalParamExtractor, TensorDictModule
from torch import nn
from torchrl.collectors import Collector
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
from torchrl.envs import Compose, GymEnv, InitTracker, RewardSum, TransformedEnv
from torchrl.modules import MLP, ProbabilisticActor, TanhNormal, ValueOperator
from torchrl.objectives import SACLoss, SoftUpdate

import koila_rl
from koila_rl.integrations.torchrl import LazyMinibatch


@dataclass
class Args:
    seed: int = 0
    env: str = "Pendulum-v1"
    total_frames: int = 4_000
    frames_per_batch: int = 50
    updates_per_batch: int = 50
    init_random_frames: int = 1_000
    minibatch: int = 256
    lr: float = 1e-3
    gamma: float = 0.99
    tau: float = 0.005
    width: int = 64
    lazy: bool = True
    memory: str | None = None
    microbatch: int | None = None


def train(args: Args) -> tuple[nn.Module, list[float]]:
    """The loss module with actor and critics, and the return of each finished episode."""
    torch.manual_seed(args.seed)
    env = TransformedEnv(GymEnv(args.env), Compose(InitTracker(), RewardSum()))
    env.set_seed(args.seed)
    inputs, outputs = env.observation_spec["observation"].shape[-1], env.action_spec.shape[-1]
    cells = [args.width, args.width]
    network = nn.Sequential(MLP(inputs, 2 * outputs, num_cells=cells), NormalParamExtractor())
    space = env.action_spec_unbatched.space
    actor = ProbabilisticActor(
        TensorDictModule(network, in_keys=["observation"], out_keys=["loc", "scale"]),
        in_keys=["loc", "scale"], distribution_class=TanhNormal, spec=env.action_spec,
        distribution_kwargs={"low": space.low, "high": space.high},
    )  # fmt: skip
    critic = ValueOperator(
        MLP(inputs + outputs, 1, num_cells=cells), in_keys=["observation", "action"]
    )
    loss_module = SACLoss(actor, critic, num_qvalue_nets=2)
    loss_module.make_value_estimator(gamma=args.gamma)
    targets = SoftUpdate(loss_module, tau=args.tau)
    optimizer = torch.optim.Adam(loss_module.parameters(), lr=args.lr)
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(args.total_frames), batch_size=args.minibatch
    )
    if args.lazy:
        buffer.append_transform(LazyMinibatch())  # the one line
    collector = Collector(
        env, actor, frames_per_batch=args.frames_per_batch, total_frames=args.total_frames,
        init_random_frames=args.init_random_frames,
    )  # fmt: skip
    curve: list[float] = []
    seen = 0
    for data in collector:
        over = data["next", "done"].squeeze(-1)
        curve += data["next", "episode_reward"].squeeze(-1)[over].tolist()
        buffer.extend(data.reshape(-1))
        seen += data.numel()
        if seen < args.init_random_frames:
            continue
        for _ in range(args.updates_per_batch):
            losses = loss_module(buffer.sample())
            loss = losses["loss_actor"] + losses["loss_qvalue"] + losses["loss_alpha"]
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            targets.step()
    collector.shutdown()
    return loss_module, curve


def main(args: Args) -> None:
    with koila_rl.limits(memory=args.memory, microbatch=args.microbatch):
        _, curve = train(args)
    late = curve[-3:]
    print(f"{len(curve)} episodes; mean return of the last three {sum(late) / len(late):.1f}")
    print(koila_rl.last_plan())


if __name__ == "__main__":
    main(tyro.cli(Args))
