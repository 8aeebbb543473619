"""DistributedDataParallel reduces once, after the last microbatch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

import koila_rl

SIZES = (7, 5)

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "views": {"gradient_as_bucket_view": True},
    "static graph": {"static_graph": True},
    "unused": {"find_unused_parameters": True},
}


def minibatch(rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(SIZES[rank], 1, generator=generator, dtype=torch.float64)


def model() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(1, 1, dtype=torch.float64)


def loss_of(module: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = (module(x) - 2 * x).pow(2).mean()
    return loss


def reduce(seen: list[int], bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    seen[0] += 1
    return allreduce_hook(dist.group.WORLD, bucket)


def worker(rank: int, folder: str) -> None:
    """Train one update of each variant; leave the gradients and the number of reductions."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    found: dict[str, Any] = {}
    for name, options in VARIANTS.items():
        reductions = [0]
        layer = model()
        parallel = DistributedDataParallel(layer, **options)
        # A lambda, since DDP compares annotations with classes and ours are strings.
        parallel.register_comm_hook(reductions, lambda seen, bucket: reduce(seen, bucket))
        for _ in range(2):
            parallel.zero_grad()
            reductions[0] = 0
            with koila_rl.limits(microbatch=2):
                loss_of(parallel, koila_rl.lazy(minibatch(rank))).backward()
            found[name] = ([p.grad.clone() for p in layer.parameters()], reductions[0])
    layer = model()
    parallel = DistributedDataParallel(layer)
    with koila_rl.limits(microbatch=2):
        with parallel.no_sync():
            loss_of(parallel, koila_rl.lazy(minibatch(rank))).backward()
        loss_of(parallel, koila_rl.lazy(minibatch(rank))).backward()
    found["no_sync"] = ([p.grad.clone() for p in layer.parameters()], 1)
    torch.save(found, Path(folder) / f"rank{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.slow
def test_gradients_are_the_mean_of_the_ranks(tmp_path: Path) -> None:
    mp.spawn(worker, args=(str(tmp_path),), nprocs=2)
    layer = model()
    each = [
        torch.autograd.grad(loss_of(layer, minibatch(rank)), list(layer.parameters()))
        for rank in range(2)
    ]
    wanted = [(a + b) / 2 for a, b in zip(*each, strict=True)]
    for rank in range(2):
        found = torch.load(tmp_path / f"rank{rank}.pt", weights_only=True)
        for name, (gradients, reductions) in found.items():
            assert reductions == 1, name
            times = 2 if name == "no_sync" else 1
            for got, mean in zip(gradients, wanted, strict=True):
                torch.testing.assert_close(got, times * mean, rtol=0, atol=1e-14, msg=name)
