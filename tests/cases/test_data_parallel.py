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
from koila_rl import UnsupportedError
from tests.helpers import allow_unsplit

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
    found["sometimes unused"] = (sometimes_unused(rank), 1)
    torch.save(found, Path(folder) / f"rank{rank}.pt")
    dist.destroy_process_group()


class Heads(nn.Module):
    """Two heads, of which an update uses one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = model(), model()

    def forward(self, x: Tensor, which: int) -> Tensor:
        y: Tensor = (self.first, self.second)[which](x)
        return y


def sometimes_unused(rank: int) -> list[Tensor]:
    """The first head's gradient after updates that used one head each, both in turn."""
    heads = Heads()
    parallel = DistributedDataParallel(heads, find_unused_parameters=True)
    gradients = []
    for which in (0, 1, 0):
        parallel.zero_grad()
        x = minibatch(rank)
        with koila_rl.limits(microbatch=2):
            (parallel(koila_rl.lazy(x), which) - 2 * x).pow(2).mean().backward()
        used, unused = (heads.first, heads.second)[:: 1 - 2 * which]
        assert all(p.grad is None or not p.grad.any() for p in unused.parameters())
        gradients = [p.grad.clone() for p in used.parameters() if p.grad is not None]
    return gradients


def sharded_worker(rank: int, folder: str) -> None:
    """A module under FSDP2: refused by name, and run whole as an opaque one."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)

    def network() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).double()

    plain, sharded = network(), network()
    mesh = init_device_mesh("cpu", (2,))
    for layer in (sharded[0], sharded[2], sharded):
        fully_shard(layer, mesh=mesh)
    with pytest.raises(UnsupportedError, match=r"FSDP2.*opaque"):
        sharded(koila_rl.lazy(x))
    with koila_rl.limits(microbatch=2), allow_unsplit():
        koila_rl.opaque(sharded)(koila_rl.lazy(x)).pow(2).mean().backward()
    plain(x).pow(2).mean().backward()
    for p, q in zip(sharded.parameters(), plain.parameters(), strict=True):
        assert q.grad is not None
        dist.all_reduce(q.grad)
        torch.testing.assert_close(p.grad.full_tensor(), q.grad / 2, rtol=0, atol=1e-14)
    dist.destroy_process_group()


@pytest.mark.slow
def test_sharded_modules(tmp_path: Path) -> None:
    mp.spawn(sharded_worker, args=(str(tmp_path),), nprocs=2)


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
