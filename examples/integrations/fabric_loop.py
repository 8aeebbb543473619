"""A policy update in Lightning Fabric's form; the one line more is marked.

python examples/integrations/fabric_loop.py --precision bf16-mixed --microbatch 64
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import tyro
from lightning_fabric import Fabric
from torch import Tensor, nn

import koila_rl


@dataclass
class Args:
    seed: int = 0
    precision: str = "32-true"
    minibatch: int = 256
    updates: int = 20
    width: int = 64
    lazy: bool = True
    memory: str | None = None
    microbatch: int | None = None


def train(args: Args) -> tuple[nn.Module, list[float]]:
    """The policy, and the loss of each update."""
    fabric = Fabric(accelerator="cpu", devices=1, precision=args.precision)
    torch.manual_seed(args.seed)
    policy = nn.Sequential(nn.Linear(8, args.width), nn.Tanh(), nn.Linear(args.width, 4))
    model, optimizer = fabric.setup(policy, torch.optim.Adam(policy.parameters(), lr=1e-3))
    losses = []
    for _ in range(args.updates):
        observation = torch.randn(args.minibatch, 8)
        action = observation[:, :4].argmax(1, keepdim=True)
        advantage = torch.rand(args.minibatch)
        minibatch: tuple[Tensor, ...] = (observation, action, advantage)
        if args.lazy:
            minibatch = koila_rl.lazy(*minibatch)  # the one line
        observation, action, advantage = minibatch
        log_prob = torch.log_softmax(model(observation), -1).gather(1, action).squeeze(1)
        loss = -(log_prob * advantage).mean()
        optimizer.zero_grad()
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        losses.append(loss.item())
    return policy, losses


def main(args: Args) -> None:
    with koila_rl.limits(memory=args.memory, microbatch=args.microbatch):
        _, losses = train(args)
    print(f"loss {losses[0]:.3f} to {losses[-1]:.3f}")
    print(koila_rl.last_plan())


if __name__ == "__main__":
    main(tyro.cli(Args))
