"""Predicted bytes against a tracked run and the allocator's record, and what planning costs.

    python benchmarks/memory.py [--gpt]

Prints a row for each network: predicted and tracked live bytes, predicted and recorded peak with
scratch memory, milliseconds of a first plan and microseconds of a known one. Times are those of
the machine at hand; run it on a quiet one.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import koila_rl
from koila_rl.engine.binding import bind
from koila_rl.memory.choose import choose
from koila_rl.memory.tracking import StorageTracker
from koila_rl.memory.workspace import allocator_peak

sys.path.insert(0, str(Path(__file__).parents[1]))  # for the model of the tests

from tests.memory.gpt import GPT, VOCABULARY, next_token_loss


def nature_cnn() -> nn.Module:
    convolutions = nn.Conv2d(4, 32, 8, 4), nn.Conv2d(32, 64, 4, 2), nn.Conv2d(64, 64, 3)
    layers = [layer for convolution in convolutions for layer in (convolution, nn.ReLU())]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(3136, 512), nn.ReLU(), nn.Linear(512, 6))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh())


def squared(module: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = module(x).pow(2).mean()
    return loss


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor], Any, str]] = {
    "MLP, N = 65,536": (mlp, lambda: torch.randn(65_536, 64), squared, "32MiB"),
    "Nature CNN, N = 512": (nature_cnn, lambda: torch.randn(512, 4, 84, 84), squared, "64MiB"),
    "transformer layer, N = 1,024": (
        lambda: nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True),
        lambda: torch.randn(1024, 32, 64), squared, "32MiB",
    ),
}  # fmt: skip
GPT_CASE = (
    GPT, lambda: torch.randint(0, VOCABULARY, (512, 129)), next_token_loss, "4GiB"
)  # fmt: skip


def measure(build: Any, make: Any, loss_of: Any, memory: str, run: bool) -> str:
    module, x = build(), make()
    with koila_rl.limits(memory=memory):
        loss = loss_of(module, koila_rl.lazy(x))
        start = time.process_time()
        plan = koila_rl.plan(loss)
        _ = plan.peak_bytes
        first = time.process_time() - start
        bound = bind([loss._node], loss._node)
        known = []
        for _ in range(200):
            start = time.perf_counter()
            choose(bound, "backward")
            known.append(time.perf_counter() - start)
        tracked = recorded = 0
        if run:
            loss.backward()
            module.zero_grad()
            loss = loss_of(module, koila_rl.lazy(x))
            with StorageTracker() as tracker:
                loss.backward()
            tracked = tracker.peak_bytes
            module.zero_grad()
            recorded, _ = allocator_peak(loss_of(module, koila_rl.lazy(x)).backward)
    size = f"{plan.passes[0].count} × {plan.microbatch_size}"
    return (
        f"{size:>12}{plan.live_bytes:>15,}{tracked:>15,}{plan.peak_bytes:>15,}{recorded:>15,}"
        f"{first * 1e3:>9.0f}{statistics.median(known) * 1e6:>8.0f}"
    )


def main() -> None:
    torch.manual_seed(0)
    columns = ("runs as", 12), ("live", 15), ("tracked", 15), ("peak", 15), ("recorded", 15)
    head = "".join(f"{name:>{width}}" for name, width in columns)
    print(f"{'':<30}{head}{'plan ms':>9}{'known':>8}")
    for name, case in CASES.items():
        print(f"{name:<30}{measure(*case, run=True)}")
    if "--gpt" in sys.argv:
        print(f"{'GPT of 124M, N = 512':<30}{measure(*GPT_CASE, run=False)}")


if __name__ == "__main__":
    main()
