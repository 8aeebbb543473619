"""Small versions of the networks that reinforcement learning uses, each with a loss."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.helpers import Program


@dataclass(frozen=True)
class Case:
    """A network, a minibatch for it of any size, and a program that returns a loss."""

    name: str
    module: Callable[[], nn.Module]
    batch: Callable[[int], tuple[Tensor, ...]]
    program: Program
    dim: int = 0
    wide: Callable[[int], tuple[Tensor, ...]] | None = None
    """Like ``batch``, with activations that dwarf what a whole minibatch of states takes."""

    def __str__(self) -> str:
        return self.name


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def integers(high: int, *shape: int) -> Tensor:
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(sum(shape)))


def regression(module: Any, x: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(module(x), target)


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(24, 64), nn.Tanh(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4)
    )


class NatureCNN(nn.Module):
    """Three convolutions and a linear layer on images given as uint8."""

    def __init__(self) -> None:
        super().__init__()
        self.convolutions = nn.Sequential(
            nn.Conv2d(2, 8, 8, 4),
            nn.ReLU(),
            nn.Conv2d(8, 12, 4, 2),
            nn.ReLU(),
            nn.Conv2d(12, 12, 3, 1),
            nn.ReLU(),
            nn.Flatten(),
        )
        self.head = nn.Linear(12 * 4, 4)

    def forward(self, images: Tensor) -> Tensor:
        head: Tensor = self.head(self.convolutions(images / 255.0))
        return head


class Impala(nn.Module):
    """Two residual stages with a normalisation that looks at one sample."""

    def __init__(self, norm: str) -> None:
        super().__init__()
        stages = []
        for stage, (width_in, width) in enumerate([(2, 8), (8, 8)]):
            edge = 8 >> stage
            layer = nn.GroupNorm(2, width) if norm == "group" else nn.LayerNorm([width, edge, edge])
            stages.append(
                nn.ModuleDict(
                    {
                        "enter": nn.Conv2d(width_in, width, 3, padding=1),
                        "norm": layer,
                        "inner": nn.Conv2d(width, width, 3, padding=1),
                    }
                )
            )
        self.stages = nn.ModuleList(stages)
        self.head = nn.Linear(8 * 4 * 4, 4)

    def forward(self, x: Tensor) -> Tensor:
        for stage in self.stages:
            x = F.max_pool2d(stage["enter"](x), 3, stride=2, padding=1)  # type: ignore[index]
            x = x + stage["inner"](F.relu(stage["norm"](x)))  # type: ignore[index]
        head: Tensor = self.head(F.relu(x).flatten(1))
        return head


def recurrent(kind: type[nn.RNNBase], batch_first: bool, state: str) -> Case:
    """A recurrent network whose initial state is absent, a whole tensor, or a wrapped one."""
    first = "batch first" if batch_first else "time first"

    def batch(n: int, steps: int = 5) -> tuple[Tensor, ...]:
        order = (n, steps) if batch_first else (steps, n)
        return (
            normal(*order, 6),
            normal(*order, 16),
            normal(n, 1, 16) if batch_first else normal(1, n, 16),
        )

    def program(module: Any, x: Tensor, target: Tensor, hidden: Tensor) -> Tensor:
        if state == "none":
            return F.mse_loss(module(x)[0], target)
        if state == "zeros":
            initial = torch.zeros(1, x.shape[0 if batch_first else 1], 16)
        else:
            initial = hidden.transpose(0, 1).contiguous() if batch_first else hidden
        given = (initial, 0.5 * initial) if kind is nn.LSTM else initial
        output, last = module(x, given)
        last = last[0] if kind is nn.LSTM else last
        return F.mse_loss(output, target) + last.pow(2).mean()

    return Case(
        f"{kind.__name__} {first}, state {state}",
        lambda: kind(6, 16, batch_first=batch_first),  # type: ignore[call-arg]
        batch,
        program,
        dim=0 if batch_first else 1,
        wide=lambda n: batch(n, steps=64),
    )


class Encoder(nn.Module):
    """A transformer encoder over tokens of which some are padding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 32)
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(32, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        padding = tokens == 0
        features = self.encoder(self.embed(tokens), src_key_padding_mask=padding)
        kept = (~padding).unsqueeze(-1).to(features.dtype)
        head: Tensor = self.head((features * kept).sum(1) / kept.sum(1))
        return head


def padded_tokens(n: int) -> Tensor:
    tokens = integers(19, n, 6) + 1
    lengths = integers(6, n) + 1
    return tokens.masked_fill(torch.arange(6) >= lengths.unsqueeze(1), 0)


class Bag(nn.Module):
    """A bag of embedded tokens under a small head."""

    def __init__(self, mode: str) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(20, 64, mode=mode, padding_idx=0)
        self.head = nn.Linear(64, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        head: Tensor = self.head(torch.tanh(self.bag(tokens)))
        return head


class Mixture(nn.Module):
    """Four experts of which two answer for each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 4)
        self.enter = nn.Parameter(0.3 * normal(4, 8, 128))
        self.leave = nn.Parameter(0.3 * normal(4, 128, 4))

    def forward(self, x: Tensor) -> Tensor:
        scores, chosen = self.gate(x).topk(2, dim=-1)
        weights = torch.zeros(x.shape[0], 4).scatter(1, chosen, scores.softmax(-1))
        hidden = F.gelu(torch.einsum("ni,eih->neh", x, self.enter))
        answers = torch.einsum("neh,eho->neo", hidden, self.leave)
        return (weights.unsqueeze(-1) * answers).sum(1)


class Dueling(nn.Module):
    """A value stream and an advantage stream whose mean is taken out."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(8, 64)
        self.value = nn.Linear(64, 1)
        self.advantage = nn.Linear(64, 5)

    def forward(self, x: Tensor) -> Tensor:
        features = F.relu(self.trunk(x))
        advantage = self.advantage(features)
        value: Tensor = self.value(features)
        return value + advantage - advantage.mean(1, keepdim=True)


class NoisyLinear(nn.Module):
    """A linear layer with factorised noise on its weights, drawn before the update."""

    def __init__(self, size_in: int, size_out: int) -> None:
        super().__init__()
        self.mean = nn.Parameter(0.3 * normal(size_out, size_in))
        self.scale = nn.Parameter(torch.full((size_out, size_in), 0.1))
        self.register_buffer("noise_in", normal(size_in))
        self.register_buffer("noise_out", normal(size_out))

    def forward(self, x: Tensor) -> Tensor:
        def squash(noise: Any) -> Any:
            return noise.sign() * noise.abs().sqrt()

        noise = torch.outer(squash(self.noise_out), squash(self.noise_in))
        return F.linear(x, self.mean + self.scale * noise)


class CausalLanguageModel(nn.Module):
    """A small causal transformer with attention written out."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 24)
        self.position = nn.Parameter(0.1 * normal(10, 24))
        self.qkv = nn.Linear(24, 72)
        self.out = nn.Linear(24, 24)
        self.norm = nn.LayerNorm(24)
        self.mlp = nn.Sequential(nn.Linear(24, 48), nn.GELU(), nn.Linear(48, 24))
        self.head = nn.Linear(24, 16, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        size, length = tokens.shape
        x = self.embed(tokens) + self.position[:length]
        parts = self.qkv(self.norm(x)).view(size, length, 3, 2, 12).permute(2, 0, 3, 1, 4)
        query, key, value = parts.unbind(0)
        scores = query @ key.transpose(-2, -1) / math.sqrt(12)
        causal = torch.ones(length, length, dtype=torch.bool).tril()
        attended = scores.masked_fill(~causal, float("-inf")).softmax(-1) @ value
        x = x + self.out(attended.transpose(1, 2).reshape(size, length, 24))
        head: Tensor = self.head(x + self.mlp(x))
        return head


class PolicyAndReference(nn.Module):
    """A language model and the frozen one that it must stay near to."""

    def __init__(self) -> None:
        super().__init__()
        self.policy = CausalLanguageModel()
        self.reference = CausalLanguageModel().requires_grad_(False)
