"""The allocator's own record against the tensors that are seen."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from koila_rl.errors import UnsupportedError
from koila_rl.memory.tracking import StorageTracker
from koila_rl.memory.workspace import OperatorWorkspaces, allocator_peak, measure_workspace
from koila_rl.recording.private import FakeTensorMode

MIB = 1 << 20


def test_without_scratch_memory_the_tensors_are_all():
    def run() -> None:
        x = torch.ones(MIB)
        y = x + x
        del x
        y.mul_(y)

    workspace = measure_workspace(run)
    assert workspace.allocator_bytes == workspace.live_bytes == 8 * MIB
    assert workspace.workspace_bytes == 0
    assert workspace.call in ("aten::add", "aten::empty")


def test_scratch_memory_is_named():
    """The factorisation's pivots and the matrix in the library's own layout are no results."""
    x = torch.eye(512) + torch.ones(512, 512) / 1024

    def run() -> None:
        torch.linalg.inv(x)

    workspace = measure_workspace(run)
    assert workspace.live_bytes >= MIB
    assert workspace.workspace_bytes > 0
    assert workspace.call.startswith("aten::")
    assert measure_workspace(run, live_bytes=1).workspace_bytes == workspace.allocator_bytes - 1


def test_what_no_operator_allocates_has_no_name():
    def run() -> None:
        torch.ones(4)
        torch.UntypedStorage(MIB)

    assert allocator_peak(run) == (MIB, "")


def nature_cnn() -> nn.Module:
    convolutions = nn.Conv2d(4, 32, 8, 4), nn.Conv2d(32, 64, 4, 2), nn.Conv2d(64, 64, 3, 1)
    layers = [layer for conv in convolutions for layer in (conv, nn.ReLU())]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(3136, 512), nn.ReLU(), nn.Linear(512, 6))


def test_convolutions_take_scratch_memory_in_proportion_to_the_microbatch():
    """So that a workspace measured at one size tells that of another."""
    network = nature_cnn()
    measured = {}
    for n in (16, 64):
        x = torch.randn(n, 4, 84, 84)

        def run(x: torch.Tensor = x) -> None:
            parameters = list(network.parameters())
            torch.autograd.grad(network(x).pow(2).mean(), parameters)

        run()
        measured[n] = measure_workspace(run)
    assert measured[64].workspace_bytes > measured[64].live_bytes // 3
    assert measured[64].call == "aten::convolution_backward"
    ratio = measured[64].workspace_bytes / measured[16].workspace_bytes
    assert ratio == pytest.approx(4, rel=0.05)


@pytest.mark.filterwarnings("ignore")  # the profiler's own
def test_agrees_with_torch_profiler():
    network, x = nature_cnn(), torch.randn(8, 4, 84, 84)

    def run() -> None:
        network(x).pow(2).mean()

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        run()
    assert record.profiler is not None
    events = [e for e in record.profiler.kineto_results.events() if e.name() == "[memory]"]
    total, peak = 0, 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        total += event.nbytes()
        peak = max(peak, total)
    assert allocator_peak(run)[0] == peak > MIB


def test_an_active_profiler_is_left_alone():
    with (
        profile(activities=[ProfilerActivity.CPU]),
        pytest.raises(UnsupportedError, match="profiler is active"),
    ):
        allocator_peak(lambda: None)


def test_an_error_passes_and_leaves_no_profiler_behind():
    def run() -> None:
        raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        allocator_peak(run)
    assert allocator_peak(lambda: None) == (0, "")


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.layer = kind(32, 64, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        features: torch.Tensor = self.layer(x)[0]
        return features


def residual() -> nn.Module:
    block = [nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()]
    return nn.Sequential(*block, nn.MaxPool2d(2), nn.Conv2d(16, 16, 3), nn.Flatten())


NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (lambda: nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 256)), (64,)),
    "nature cnn": (nature_cnn, (4, 84, 84)),
    "residual": (residual, (3, 32, 32)),
    "gru": (lambda: Recurrent(nn.GRU), (20, 32)),
    "lstm": (lambda: Recurrent(nn.LSTM), (20, 32)),
    "attention": (lambda: nn.TransformerEncoderLayer(64, 4, 128, batch_first=True), (32, 64)),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_fake_runs_tell_the_allocators_peak_at_other_sizes(name: str):
    """Measured with 16 samples and, for what does not depend on their number, with 24."""
    build, shape = NETWORKS[name]
    network, workspaces = build(), OperatorWorkspaces()

    def update(network: nn.Module, x: torch.Tensor) -> None:
        network(x).pow(2).mean().backward()

    update(network, torch.ones(2, *shape))  # libraries set themselves up
    network.zero_grad()
    for n in (16, 24):
        workspaces.measure(lambda n=n: update(network, torch.ones(n, *shape)))
        network.zero_grad()
    for n in (8, 16, 48):
        network.zero_grad()
        real, _ = allocator_peak(lambda n=n: update(network, torch.ones(n, *shape)))
        with FakeTensorMode():
            fake, x = build(), torch.ones(n, *shape)
            with StorageTracker(workspaces=workspaces) as tracker:
                x = x + 0  # the real run makes its samples too
                update(fake, x)
        assert tracker.allocator_peak_bytes == pytest.approx(real, rel=0.02)
        assert tracker.allocator_peak_bytes >= tracker.peak_bytes


def test_workspaces_of_sizes_not_measured():
    workspaces = OperatorWorkspaces()
    invert, multiply = torch.ops.aten.linalg_inv_ex.default, torch.ops.aten.mm.default

    def at(*shape: int) -> int:
        return workspaces.of(invert, (torch.ones(shape),), {})

    workspaces.measure(lambda: torch.linalg.inv(torch.eye(64).expand(8, 64, 64)))
    one = at(8, 64, 64)
    assert one > 0
    assert at(24, 64, 64) == 3 * one
    workspaces.measure(lambda: torch.linalg.inv(torch.eye(64).expand(16, 64, 64)))
    two = at(16, 64, 64)
    assert at(24, 64, 64) == two + (two - one)
    assert at(24, 64, 65) == at(64, 64) == 0
    assert workspaces.of(multiply, (torch.ones(64, 64), torch.ones(64, 64)), {}) == 0


def test_measuring_leaves_an_active_profiler_alone():
    with (
        profile(activities=[ProfilerActivity.CPU]),
        pytest.raises(UnsupportedError, match="profiler is active"),
    ):
        OperatorWorkspaces().measure(lambda: None)
