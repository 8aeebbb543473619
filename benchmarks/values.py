"""Critic passes of a rollout: in large microbatches after it against one at every step.

    python benchmarks/values.py [--steps 256] [--envs 32] [--rounds 7]

The same network values the same observations, once as `[n_envs]` at each step without gradients,
as an agent does that stores V as it acts, and once as one lazy forward over `[n_steps * n_envs]`
under a memory limit, in as many microbatches as it asks for. The results are compared first. Times
are the least of the rounds, which take turns.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

import koila_rl


def perceptron() -> tuple[nn.Module, tuple[int, ...]]:
    """Two layers of 64, PPO's default."""
    layers = [nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1)]
    return nn.Sequential(*layers), (8,)


def wide() -> tuple[nn.Module, tuple[int, ...]]:
    """Two layers of 256."""
    layers = [nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 1)]
    return nn.Sequential(*layers), (32,)


NETWORKS = {"2 × 64": perceptron, "2 × 256": wide}


def measure(name: str, options: argparse.Namespace) -> None:
    """One line of the table."""
    torch.manual_seed(0)
    network, shape = NETWORKS[name]()
    observations = torch.randn(options.steps, options.envs, *shape)

    def stepwise() -> Tensor:
        with torch.no_grad():
            return torch.stack([network(observation).squeeze(-1) for observation in observations])

    def deferred() -> Tensor:
        with torch.no_grad():
            lazy = koila_rl.lazy(observations.flatten(0, 1))
            values: Tensor = koila_rl.materialize(network(lazy).squeeze(-1))
        return values.unflatten(0, (options.steps, options.envs))

    with koila_rl.limits(memory=options.memory):
        torch.testing.assert_close(deferred(), stepwise(), rtol=1e-4, atol=1e-5)
        plan = koila_rl.last_plan()
        assert plan is not None
        one, many = [], []
        for _ in range(options.rounds):
            one.append(_seconds(stepwise))
            many.append(_seconds(deferred))
    count = plan.passes[0].count
    print(
        f"| {name} | {options.steps} × {options.envs} | {count} × {plan.microbatch_size:,} "
        f"| {min(one) * 1e3:.1f} | {min(many) * 1e3:.1f} | {min(one) / min(many):.1f} |",
        flush=True,
    )


def _seconds(call: Callable[[], Tensor]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=256)
    parser.add_argument("--envs", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--memory", default="2MiB", help="that the deferred pass may take")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print("| critic | rollout | microbatches | a step, ms | deferred, ms | times faster |")
    print("|---|---|---|---|---|---|")
    for name in NETWORKS:
        measure(name, options)


if __name__ == "__main__":
    main()
