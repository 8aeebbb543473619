"""Whether `limits(tune=True)` finds the fastest microbatch size, against a sweep over all of them.

    python benchmarks/tuning.py [--rounds 15] [NETWORK ...]

Each network is updated under a memory limit, first with `tune=True` until the size is settled, then
at every size that the tuner had to choose from, sizes taking turns. The figure is the least time of
the fastest size over the least time of the size that was kept: 100 % is the best there is. Times
are of loss and backward, without the optimizer.
"""

from __future__ import annotations

import argparse
import time

import torch
from torch import Tensor, nn

import koila_rl
from koila_rl.memory.tuner import candidates


def perceptron() -> tuple[nn.Module, Tensor]:
    """Two layers of 64: all that is read and written fits the cache at any size."""
    layers = [nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1)]
    return nn.Sequential(*layers), torch.randn(4096, 8)


def wide() -> tuple[nn.Module, Tensor]:
    """Three layers of 512."""
    layers = [nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512)]
    return nn.Sequential(*layers), torch.randn(2048, 64)


def nature() -> tuple[nn.Module, Tensor]:
    """The convolutions of Mnih et al. 2015 on pictures of 84 × 84."""
    layers = [
        nn.Conv2d(4, 32, 8, 4), nn.ReLU(), nn.Conv2d(32, 64, 4, 2), nn.ReLU(),
        nn.Conv2d(64, 64, 3), nn.ReLU(), nn.Flatten(), nn.Linear(3136, 512), nn.ReLU(),
        nn.Linear(512, 6),
    ]  # fmt: skip
    return nn.Sequential(*layers), torch.rand(128, 4, 84, 84)


NETWORKS = {"perceptron": perceptron, "wide": wide, "nature": nature}


def update(network: nn.Module, x: Tensor) -> float:
    """Seconds of loss and backward."""
    network.zero_grad()
    began = time.perf_counter()
    network(koila_rl.lazy(x)).square().mean().backward()
    return time.perf_counter() - began


def measure(name: str, rounds: int) -> None:
    """One line of the table."""
    torch.manual_seed(0)
    network, x = NETWORKS[name]()
    with koila_rl.limits(memory="1GiB"):
        update(network, x)
        plan = koila_rl.last_plan()
        assert plan is not None
        sizes = candidates(plan.fit if plan.split else len(x), len(x))
        tried = []
        with koila_rl.limits(tune=True):
            while len(tried) < 6 * len(sizes):
                update(network, x)
                plan = koila_rl.last_plan()
                assert plan is not None
                tried.append(plan.microbatch_size)
    kept = tried[-1]
    least = {size: float("inf") for size in sizes}
    for _ in range(rounds):
        for size in sizes:
            with koila_rl.limits(microbatch=size):
                least[size] = min(least[size], update(network, x))
    best = min(least, key=lambda size: least[size])
    print(
        f"| {name} | {len(x):,} | {', '.join(map(str, sizes))} | {best:,}: {least[best] * 1e3:.2f} "
        f"| {kept:,}: {least[kept] * 1e3:.2f} | {least[best] / least[kept]:.1%} "
        f"| {least[sizes[0]] * 1e3:.2f} |",
        flush=True,
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("networks", nargs="*", default=list(NETWORKS), metavar="NETWORK")
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print("| network | minibatch | sizes | fastest, ms | kept, ms | of the best | whole, ms |")
    print("|---|---|---|---|---|---|---|")
    for name in options.networks:
        measure(name, options.rounds)


if __name__ == "__main__":
    main()
