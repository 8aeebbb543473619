"""What recording costs: whole updates, lazy against plain, side by side.

    OMP_NUM_THREADS=1 python benchmarks/overhead.py [--case CASE] [--rounds N] [--compile]
                                                     [--cpu-time] [--profile]

One process, one thread. An update is forward, backward, gradient clipping and Adam on a minibatch
that is at hand; plain and lazy updates take turns, on twins of one network, so that drift hits
both alike. Medians of wall time; ``ratio`` is the median of each round's ratio. ``split`` compares
with a hand-written loop that accumulates over the same microbatches, and both are given the
minibatch whole. On a machine that others use too, ``--cpu-time`` counts the process's own time.
"""

from __future__ import annotations

import argparse
import copy
import cProfile
import platform
import pstats
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import koila_rl

Batch = dict[str, Tensor]
Loss = Callable[[Any, Batch], Tensor]


class ActorCritic(nn.Module):
    """A policy and a value network without shared layers, as for CartPole."""

    def __init__(self) -> None:
        super().__init__()
        self.policy = _mlp(4, 2)
        self.value = _mlp(4, 1)

    def forward(self, observation: Tensor) -> tuple[Tensor, Tensor]:
        return self.policy(observation), self.value(observation).squeeze(-1)


def _mlp(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(inputs, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, outputs)
    )


class NatureActorCritic(nn.Module):
    """The convolutional network of Mnih et al. (2015) with a policy and a value head."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(
            nn.Conv2d(4, 32, 8, 4), nn.ReLU(), nn.Conv2d(32, 64, 4, 2), nn.ReLU(),
            nn.Conv2d(64, 64, 3, 1), nn.ReLU(), nn.Flatten(), nn.Linear(3136, 512), nn.ReLU(),
        )  # fmt: skip
        self.policy, self.value = nn.Linear(512, 6), nn.Linear(512, 1)

    def forward(self, observation: Tensor) -> tuple[Tensor, Tensor]:
        features = self.trunk(observation.float() / 255)
        return self.policy(features), self.value(features).squeeze(-1)


class QNetworks(nn.Module):
    """A Q network and its target, as for CartPole."""

    def __init__(self) -> None:
        super().__init__()
        self.online = _mlp(4, 2)
        self.target = _mlp(4, 2).requires_grad_(False)


def ppo_loss(network: Any, batch: Batch) -> Tensor:
    """Clipped surrogate, value error and entropy, advantages normalised in the minibatch."""
    logits, value = network(batch["observation"])
    policy = torch.distributions.Categorical(logits=logits)
    log_ratio = policy.log_prob(batch["action"]) - batch["action_log_prob"]
    ratio = log_ratio.exp()
    advantage = batch["advantage"]
    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    surrogate = torch.min(advantage * ratio, advantage * ratio.clamp(0.8, 1.2)).mean()
    value_loss = F.mse_loss(value, batch["value_target"])
    return -surrogate + 0.5 * value_loss - 0.01 * policy.entropy().mean()


def dqn_loss(network: Any, batch: Batch) -> Tensor:
    """Huber loss of the one-step TD error."""
    with torch.no_grad():
        following = network.target(batch["next_observation"]).amax(dim=1)
        target = batch["reward"] + 0.99 * (1 - batch["terminated"]) * following
    chosen = network.online(batch["observation"]).gather(1, batch["action"][:, None]).squeeze(1)
    return F.smooth_l1_loss(chosen, target)


def ppo_batch(n: int, shape: tuple[int, ...], actions: int, dtype: torch.dtype) -> Batch:
    observation = torch.randint(0, 256, (n, *shape)).to(dtype)
    if dtype.is_floating_point:
        observation = torch.randn(n, *shape)
    return {
        "observation": observation,
        "action": torch.randint(0, actions, (n,)),
        "action_log_prob": torch.full((n,), -1.0),
        "advantage": torch.randn(n),
        "value_target": torch.randn(n),
    }


def dqn_batch(n: int) -> Batch:
    return {
        "observation": torch.randn(n, 4),
        "next_observation": torch.randn(n, 4),
        "action": torch.randint(0, 2, (n,)),
        "reward": torch.randn(n),
        "terminated": (torch.rand(n) < 0.1).float(),
    }


CASES: dict[str, tuple[Callable[[], nn.Module], Loss, Callable[[], Batch], int | None, int]] = {
    # network, loss, minibatch, microbatch, updates a round
    "ppo": (ActorCritic, ppo_loss, lambda: ppo_batch(256, (4,), 2, torch.float32), None, 20),
    "dqn": (QNetworks, dqn_loss, lambda: dqn_batch(128), None, 40),
    "cnn": (NatureActorCritic, ppo_loss, lambda: ppo_batch(256, (4, 84, 84), 6, torch.uint8),
            None, 1),
    "ppo split": (ActorCritic, ppo_loss, lambda: ppo_batch(4096, (4,), 2, torch.float32), 512, 4),
    "cnn split": (NatureActorCritic, ppo_loss,
                  lambda: ppo_batch(256, (4, 84, 84), 6, torch.uint8), 64, 1),
}  # fmt: skip


class Learner:
    """A network, its optimizer and a way to make an update."""

    def __init__(self, network: nn.Module, backward: Callable[[nn.Module, Batch], None]) -> None:
        self.network = network
        self.parameters = [x for x in network.parameters() if x.requires_grad]
        self.optimizer = torch.optim.Adam(self.parameters, lr=3e-4, eps=1e-5)
        self.backward = backward

    def update(self, batch: Batch) -> None:
        self.optimizer.zero_grad()
        self.backward(self.network, batch)
        nn.utils.clip_grad_norm_(self.parameters, 0.5)
        self.optimizer.step()


def plain(loss: Loss) -> Callable[[nn.Module, Batch], None]:
    return lambda network, batch: loss(network, batch).backward()


def accumulated(loss: Loss, size: int) -> Callable[[nn.Module, Batch], None]:
    """The loop people write: advantages normalised beforehand, losses weighted by their share."""

    def backward(network: nn.Module, batch: Batch) -> None:
        n = len(batch["observation"])
        advantage = batch["advantage"]
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        for start in range(0, n, size):
            part = {name: x[start : start + size] for name, x in batch.items()}
            part["advantage"] = advantage[start : start + size]
            (loss(network, part) * (len(part["advantage"]) / n)).backward()

    return backward


def without_normalisation(network: Any, batch: Batch) -> Tensor:
    """`ppo_loss` on advantages that are normalised already."""
    logits, value = network(batch["observation"])
    policy = torch.distributions.Categorical(logits=logits)
    ratio = (policy.log_prob(batch["action"]) - batch["action_log_prob"]).exp()
    advantage = batch["advantage"]
    surrogate = torch.min(advantage * ratio, advantage * ratio.clamp(0.8, 1.2)).mean()
    value_loss = F.mse_loss(value, batch["value_target"])
    return -surrogate + 0.5 * value_loss - 0.01 * policy.entropy().mean()


def lazily(loss: Loss, size: int | None, compiled: bool) -> Callable[[nn.Module, Batch], None]:
    options: dict[str, Any] = {"compile": True} if compiled else {}

    def backward(network: nn.Module, batch: Batch) -> None:
        limited = koila_rl.limits(microbatch=size, **options) if size or compiled else nullcontext()
        with limited:
            loss(network, koila_rl.lazy(batch)).backward()

    return backward


def measure(
    case: str, rounds: int, compiled: bool, profile: bool, clock: Callable[[], float]
) -> dict[str, float]:
    """Milliseconds of an update, plain and lazy, and their ratio."""
    make, loss, batch_of, size, updates = CASES[case]
    torch.manual_seed(0)
    network = make()
    other = plain(loss) if size is None else accumulated(without_normalisation, size)
    learners = {
        "plain": Learner(network, other),
        "lazy": Learner(copy.deepcopy(network), lazily(loss, size, compiled)),
    }
    batches = [batch_of() for _ in range(4)]

    def run(learner: Learner) -> float:
        start = clock()
        for k in range(updates):
            learner.update(batches[k % len(batches)])
        return (clock() - start) / updates * 1e3

    # A program is compiled after some fifty updates.
    for learner in learners.values():
        for _ in range(2 + 80 // updates if compiled else 2):
            run(learner)
    taken: dict[str, list[float]] = {name: [] for name in learners}
    for number in range(rounds):
        order = list(learners) if number % 2 else list(reversed(learners))
        for name in order:
            taken[name].append(run(learners[name]))
    if profile:
        profiler = cProfile.Profile()
        profiler.enable()
        for _ in range(10):
            run(learners["lazy"])
        profiler.disable()
        pstats.Stats(profiler).sort_stats("tottime").print_stats(35)
    ratios = [lazy / eager for lazy, eager in zip(taken["lazy"], taken["plain"], strict=True)]
    return {name: statistics.median(times) for name, times in taken.items()} | {
        "ratio": statistics.median(ratios)
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--case", choices=[*CASES, "all"], default="all")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--compile", action="store_true", help="compile replays")
    parser.add_argument("--cpu-time", action="store_true", help="time of the process's own")
    parser.add_argument("--profile", action="store_true", help="profile the lazy updates")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, {platform.processor() or platform.machine()}, one thread")
    print(f"{'':<12}{'plain':>10}{'lazy':>10}{'ratio':>8}")
    clock = time.process_time if options.cpu_time else time.perf_counter
    for case in CASES if options.case == "all" else [options.case]:
        found = measure(case, options.rounds, options.compile, options.profile, clock)
        print(f"{case:<12}{found['plain']:>8.2f}ms{found['lazy']:>8.2f}ms{found['ratio']:>8.2f}")


if __name__ == "__main__":
    main()
