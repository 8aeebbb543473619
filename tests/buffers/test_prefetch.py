"""Rows of the next microbatch are fetched while one computes, and the plan counts them."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import koila_rl
from koila_rl import RolloutBuffer
from koila_rl.buffers.rows import StoredSource
from koila_rl.buffers.transforms import to_tensor
from koila_rl.memory.tracking import StorageTracker

N = 50


def rollout(storage: str = "memmap", **settings: Any) -> RolloutBuffer:
    buffer = RolloutBuffer(N // 2, 2, seed=0, storage=storage, **settings)  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(0)
    for _ in range(N // 2):
        images = torch.randint(0, 256, (2, 20, 20, 3), dtype=torch.uint8, generator=generator)
        buffer.add({"image": images})
    return buffer


class Network(nn.Module):
    def __init__(self, channels_last: bool) -> None:
        super().__init__()
        self.channels_last = channels_last
        self.convolution = nn.Conv2d(3, 4, 5, stride=3)
        self.head = nn.Linear(4 * 36, 1)

    def forward(self, images: Tensor) -> Tensor:
        if self.channels_last:
            images = images.permute(0, 3, 1, 2).float() / 255
        return self.head(self.convolution(images).relu().flatten(1)).squeeze(-1)


def network(channels_last: bool = True) -> Network:
    torch.manual_seed(0)
    return Network(channels_last)


def update(module: Network, buffer: RolloutBuffer, lazy: bool = True) -> Tensor:
    (part,) = buffer.minibatches(N, lazy=lazy)
    loss = module(part["image"]).pow(2).mean()
    module.zero_grad()
    loss.backward()
    return torch.cat([p.grad.flatten() for p in module.parameters() if p.grad is not None])


@pytest.fixture
def gathers(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, int]]:
    """Which thread gathered which rows of the images."""
    seen: list[tuple[str, int, int]] = []
    inner = StoredSource.gather

    def noted(self: Any, start: int, stop: int, out: Tensor | None = None) -> Tensor:
        if len(self.shape) == 4:
            seen.append((threading.current_thread().name, start, stop))
        return inner(self, start, stop, out)

    monkeypatch.setattr(StoredSource, "gather", noted)
    return seen


@pytest.mark.parametrize("transform", [None, to_tensor])
def test_the_next_rows_of_a_memory_map_come_by_a_thread(
    transform: Any, gathers: list[tuple[str, int, int]]
) -> None:
    buffer = rollout(transforms={"image": transform} if transform else None)
    module = network(channels_last=transform is None)
    expected = update(module, buffer, lazy=False)
    gathers.clear()
    with koila_rl.limits(microbatch=16):
        found = update(module, buffer)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    places = [(start, stop) for _, start, stop in gathers]
    assert places == [(0, 16), (16, 32), (32, 48), (48, 50)]
    names = [name.startswith("koila_rl-rows") for name, _, _ in gathers]
    assert names == [False, True, True, True]


def test_rows_in_ram_are_read_when_they_are_needed(gathers: list[tuple[str, int, int]]) -> None:
    with koila_rl.limits(microbatch=16):
        update(network(), rollout("ram"))
    assert {name for name, _, _ in gathers} == {threading.current_thread().name}


@pytest.mark.parametrize("microbatch", [16, 30])
@pytest.mark.parametrize(
    ("storage", "transform"), [("memmap", None), ("memmap", to_tensor), ("ram", to_tensor)]
)
def test_the_plan_is_the_tracked_peak(storage: str, transform: Any, microbatch: int) -> None:
    buffer = rollout(storage, transforms={"image": transform} if transform else None)
    module = network(channels_last=transform is None)
    with koila_rl.limits(microbatch=microbatch):
        for _ in range(2):
            module.zero_grad()
            gc.collect()
            # Recorded inside: what is read counts.
            with StorageTracker(follow_fake=False) as tracked:
                update(module, buffer)
    plan = koila_rl.last_plan()
    assert plan is not None
    assert plan.split
    assert plan.live_bytes == tracked.peak_bytes


def test_what_fails_in_the_thread_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    inner = StoredSource.gather

    def failing(self: Any, start: int, stop: int, out: Tensor | None = None) -> Tensor:
        if out is not None:
            raise OSError(5, "the disk is gone")
        return inner(self, start, stop, out)

    monkeypatch.setattr(StoredSource, "gather", failing)
    module = network()
    with koila_rl.limits(microbatch=16), pytest.raises(OSError, match="the disk is gone"):
        update(module, rollout())
    assert all(p.grad is None for p in module.parameters())


def test_recovery_lets_rows_go_that_were_read_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    ahead: list[weakref.ref[Tensor]] = []
    alive: list[int] = []
    inner = StoredSource.gather

    def noted(self: Any, start: int, stop: int, out: Tensor | None = None) -> Tensor:
        if len(self.shape) == 4:
            if (start, out) == (0, None) and ahead:  # the run that restarts
                alive.append(sum(ref() is not None for ref in ahead))
            if out is not None:
                ahead.append(weakref.ref(out))
        return inner(self, start, stop, out)

    monkeypatch.setattr(StoredSource, "gather", noted)
    buffer, module = rollout(), network()
    expected = update(module, buffer, lazy=False)
    failed: list[int] = []

    class FailOnce(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if func is torch.ops.aten.convolution.default and not failed and ahead:
                failed.append(len(ahead))
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
            return func(*args, **(kwargs or {}))

    with koila_rl.limits(microbatch=16), FailOnce():
        found = update(module, buffer)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    assert failed
    assert alive == [0]
    plan = koila_rl.last_plan()
    assert plan is not None
    assert (plan.retries, plan.passes[0].microbatch_size) == (1, 8)


def test_rows_are_fetched_ahead_under_inference_mode(gathers: list[tuple[str, int, int]]) -> None:
    buffer, module = rollout(), network()
    (part,) = buffer.minibatches(N)
    gathers.clear()
    with koila_rl.limits(microbatch=16), torch.inference_mode():
        total = module(part["image"]).sum().item()
    plan = koila_rl.last_plan()
    assert plan is not None
    assert not plan.unsplit
    assert [stop for _, _, stop in gathers] == [16, 32, 48, 50]
    images = buffer.data["image"].flatten(0, 1)
    assert total == pytest.approx(module(images).sum().item(), rel=1e-4)
