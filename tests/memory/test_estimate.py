"""Predicted bytes against a tracked run: equal to the byte, for every kind of network."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tensordict import TensorDict
from torch import Tensor, nn

import koila_rl
from koila_rl.memory.simulated import SimulatedDevice
from koila_rl.memory.tracking import StorageTracker
from koila_rl.memory.workspace import allocator_peak
from tests.engine import networks as K
from tests.engine.networks import Case, normal
from tests.engine.test_networks import CASES, BatchNormStack
from tests.helpers import allow_unsplit
from tests.memory.gpt import GPT, VOCABULARY, next_token_loss

SIZES = (2, 3, 7, 11, 32, 64, 100, 257)


def points(n: int) -> tuple[Tensor, ...]:
    return (normal(n, 8),)


def layer() -> nn.Module:
    return nn.Linear(8, 16)


STAGED = [
    Case("batch norm", lambda: BatchNormStack(2), lambda n: (normal(n, 8), normal(n, 8)),
         K.regression),
    Case("over the deviation", layer, points, lambda m, x: (m(x) / m(x).std()).pow(2).mean()),
    Case("below the maximum", layer, points, lambda m, x: (m(x) - m(x).amax()).pow(2).mean()),
    Case("softmax over samples", layer, points, lambda m, x: (m(x).softmax(0) * m(x)).sum()),
    Case("pairs", layer, points,
         lambda m, x: F.cross_entropy(m(x) @ m(x).T, torch.arange(x.shape[0]))),
    Case("dropout", layer, points, lambda m, x: F.dropout(m(x), 0.5).pow(2).mean()),
]  # fmt: skip
EVERY = [*CASES, *STAGED]
FEW = [case for case in EVERY if case.name in {
    "MLP", "Nature CNN", "IMPALA with GroupNorm", "LSTM batch first, state none",
    "GRU time first, state given", "transformer encoder", "bag of tokens, mean",
    "mixture of experts", "C51", "batch norm", "over the deviation", "below the maximum",
}]  # fmt: skip


def difference(case: Case, n: int, microbatch: int, how: str, module: nn.Module) -> int:
    """Bytes of a second run, tracked, less those predicted for it."""
    batch = case.batch(n)

    def run() -> tuple[koila_rl.Plan, int]:
        module.zero_grad()
        gc.collect()
        with koila_rl.limits(microbatch=microbatch), allow_unsplit():
            lazy = [koila_rl.lazy(x, batch=case.dim) for x in batch]
            with torch.set_grad_enabled(how != "forward"):
                loss = case.program(module, *lazy)
            del lazy
            with StorageTracker() as tracker:
                if how == "backward":
                    loss.backward()
                else:
                    loss.item()
            if how == "value" and microbatch >= n:
                # The plan of a value that runs whole is for the backward that follows, too.
                with tracker:
                    loss.backward()
            plan = koila_rl.last_plan()
        assert plan is not None
        return plan, tracker.peak_bytes

    run()
    plan, peak = run()
    assert plan.split == (microbatch < n)
    assert plan.live_bytes > 0
    return peak - plan.live_bytes


@pytest.mark.parametrize("case", FEW, ids=str)
def test_no_byte_off(case: Case) -> None:
    torch.manual_seed(0)
    module = case.module()
    for microbatch, how in [(5, "backward"), (23, "backward"), (5, "forward")]:
        assert difference(case, 23, microbatch, how, module) == 0, (microbatch, how)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("case", EVERY, ids=str)
def test_no_byte_off_at_any_size(case: Case) -> None:
    torch.manual_seed(0)
    module = case.module()
    for n in SIZES:
        for microbatch in sorted({max(1, n // 7), n // 2, n - 1, n}):
            for how in ("forward", "value", "backward"):
                assert difference(case, n, microbatch, how, module) == 0, (n, microbatch, how)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_no_byte_off_for_a_language_model_of_124_million_parameters() -> None:
    module = GPT()
    assert sum(p.numel() for p in module.parameters()) == 124_439_808

    def batch(n: int) -> tuple[Tensor, ...]:
        return (torch.randint(0, VOCABULARY, (n, 9)),)

    case = Case("GPT", lambda: module, batch, next_token_loss)
    for n in (2, 3, 4, 5, 6, 7, 8, 9):
        for microbatch, how in [(1, "backward"), (n, "backward"), (n // 2, "forward")]:
            assert difference(case, n, microbatch, how, module) == 0, (n, microbatch, how)


def test_no_byte_off_where_gradients_exist_and_where_a_device_may_run_out() -> None:
    module = K.mlp()
    x, target = normal(64, 24), normal(64, 4)
    with SimulatedDevice("1GiB").register(module, x, target) as device:
        for microbatch in (64, 20):
            for _ in range(3):
                with koila_rl.limits(microbatch=microbatch):
                    loss = K.regression(module, *koila_rl.lazy(x, target))
                    device.reset_peak()
                    before = device.live_bytes
                    loss.backward()
                plan = koila_rl.last_plan()
                assert plan is not None
                assert plan.workspace_bytes == 0
                assert device.peak_bytes - before == plan.peak_bytes


def test_rows_that_are_read_on_demand_count_a_microbatch_at_a_time() -> None:
    module = nn.Linear(64, 4)
    buffer = koila_rl.ReplayBuffer(256, seed=0)
    buffer.extend(TensorDict({"observation": torch.ones(256, 64)}, batch_size=[256]))

    def peak(microbatch: int) -> int:
        with koila_rl.limits(microbatch=microbatch):
            x = buffer.sample(256)["observation"]
            return koila_rl.plan(module(x).pow(2).mean()).live_bytes

    assert 32 * 64 * 4 < peak(16) < 256 * 64 * 4 < peak(256)


NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (lambda: nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 256)), (64,)),
    "residual": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(16, 16, 3), nn.Flatten(),
        ),
        (3, 32, 32),
    ),
    "gru": (lambda: Last(nn.GRU(32, 64, batch_first=True)), (20, 32)),
    "lstm": (lambda: Last(nn.LSTM(32, 64, batch_first=True)), (20, 32)),
    "attention": (lambda: nn.TransformerEncoderLayer(64, 4, 128, batch_first=True), (32, 64)),
}  # fmt: skip


class Last(nn.Module):
    """The outputs of a recurrent layer without its last state."""

    def __init__(self, recurrent: nn.Module) -> None:
        super().__init__()
        self.recurrent = recurrent

    def forward(self, x: Tensor) -> Tensor:
        features: Tensor = self.recurrent(x)[0]
        return features


@pytest.mark.parametrize("name", NETWORKS)
def test_the_allocators_record_agrees_within_five_percent(name: str) -> None:
    build, shape = NETWORKS[name]
    n = 100
    torch.manual_seed(0)
    module, x = build(), torch.randn(n, *shape)

    def update(microbatch: int) -> Any:
        module.zero_grad()
        with koila_rl.limits(microbatch=microbatch), allow_unsplit():
            return module(koila_rl.lazy(x)).pow(2).mean()

    for microbatch in (n, 16):
        update(microbatch).backward()
        loss = update(microbatch)
        with koila_rl.limits(microbatch=microbatch), allow_unsplit():
            real, _ = allocator_peak(loss.backward)
        plan = koila_rl.last_plan()
        assert plan is not None
        assert plan.peak_bytes == plan.live_bytes + plan.workspace_bytes
        assert plan.peak_bytes == pytest.approx(real, rel=0.05)
