"""The allocator's own record against the tensors that are seen."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from koila_rl.errors import UnsupportedError
from koila_rl.memory.workspace import allocator_peak, measure_workspace

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
