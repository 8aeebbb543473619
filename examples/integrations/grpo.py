"""GRPO on a tiny causal transformer; the one line more is marked.

The task: after a prompt digit d, write d + 1, d + 2, … modulo ten. A group is several completions
of one prompt; advantages are rewards normalised within the group (Shao et al. 2024, DeepSeekMath),
the loss is a mean over the tokens of all completions up to their end, with a KL penalty to the
reference model.

python examples/integrations/grpo.py --updates 60 --microbatch 16
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
import torch.nn.functional as F
import tyro
from torch import Tensor, nn

import koila_rl

DIGITS, END = 10, 10


@dataclass
class Args:
    seed: int = 0
    updates: int = 60
    prompts: int = 8
    group: int = 16
    length: int = 6
    epochs: int = 2
    learning_rate: float = 3e-3
    clip: float = 0.2
    beta: float = 0.02
    width: int = 32
    lazy: bool = True
    memory: str | None = None
    microbatch: int | None = None


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        n, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(n, length, 3, 4, width // 4).unbind(2)
        heads = F.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True
        )
        x = x + self.out(heads.transpose(1, 2).reshape(n, length, width))
        y: Tensor = x + self.mlp(self.norm2(x))
        return y


class Transformer(nn.Module):
    def __init__(self, width: int, length: int) -> None:
        super().__init__()
        self.token = nn.Embedding(DIGITS + 1, width)
        self.place = nn.Parameter(0.1 * torch.randn(length + 1, width))
        self.blocks = nn.Sequential(Block(width), Block(width))
        self.head = nn.Linear(width, DIGITS + 1)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens) + self.place[: tokens.shape[1]]
        logits: Tensor = self.head(self.blocks(x))
        return logits


@torch.no_grad()
def complete(model: Transformer, prompts: Tensor, length: int) -> Tensor:
    """Tokens ``[N, 1 + length]``: each prompt with a completion drawn from the model."""
    tokens = prompts[:, None]
    for _ in range(length):
        probabilities = model(tokens)[:, -1].softmax(-1)
        tokens = torch.cat([tokens, torch.multinomial(probabilities, 1)], 1)
    return tokens


def reward(tokens: Tensor, mask: Tensor) -> Tensor:
    """The share of places, up to the end, where a token follows the one before."""
    right = (tokens[:, 1:] == (tokens[:, :-1] + 1) % DIGITS) & (tokens[:, 1:] < DIGITS)
    return (right * mask).sum(1) / mask.shape[1]


def log_probs(model: Transformer, tokens: Tensor) -> Tensor:
    logits = model(tokens[:, :-1])
    return torch.log_softmax(logits, -1).gather(2, tokens[:, 1:, None]).squeeze(2)


def grpo_loss(
    model: Transformer, reference: Transformer, args: Args,
    tokens: Tensor, mask: Tensor, advantage: Tensor, old: Tensor,
) -> Tensor:  # fmt: skip
    found = log_probs(model, tokens)
    with torch.no_grad():
        base = log_probs(reference, tokens)
    ratio = (found - old).exp()
    clipped = ratio.clamp(1 - args.clip, 1 + args.clip)
    gain = torch.min(ratio * advantage[:, None], clipped * advantage[:, None])
    kl = (base - found).exp() - (base - found) - 1
    return -((gain - args.beta * kl) * mask).sum() / mask.sum()


def train(args: Args) -> tuple[nn.Module, list[float]]:
    """The model, and the mean reward of each round of completions."""
    torch.manual_seed(args.seed)
    model = Transformer(args.width, args.length)
    reference = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate)
    curve: list[float] = []
    for _ in range(args.updates):
        prompts = torch.randint(DIGITS, (args.prompts,)).repeat_interleave(args.group)
        tokens = complete(model, prompts, args.length)
        ended = (tokens[:, 1:] == END).long().cumsum(1)
        mask = (ended - (tokens[:, 1:] == END).long() == 0).float()
        rewards = reward(tokens, mask)
        groups = rewards.view(args.prompts, args.group)
        advantage = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)
        minibatch: tuple[Tensor, ...] = (tokens, mask, advantage.flatten())
        if args.lazy:
            minibatch = koila_rl.lazy(*minibatch)  # the one line
        with torch.no_grad():
            old = koila_rl.materialize(log_probs(model, minibatch[0]))
        for _ in range(args.epochs):
            loss = grpo_loss(model, reference, args, *minibatch, old)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        curve.append(rewards.mean().item())
    return model, curve


def main(args: Args) -> None:
    with koila_rl.limits(memory=args.memory, microbatch=args.microbatch):
        _, curve = train(args)
    print(f"mean reward {curve[0]:.2f} to {sum(curve[-5:]) / len(curve[-5:]):.2f}")
    print(koila_rl.last_plan())


if __name__ == "__main__":
    main(tyro.cli(Args))
