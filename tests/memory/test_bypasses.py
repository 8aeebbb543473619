"""What no operator allocates is followed too, and everything is put back afterwards."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from koila_rl.memory.simulated import SimulatedDevice
from koila_rl.memory.tracking import StorageTracker
from koila_rl.memory.workspace import allocator_peak
from koila_rl.recording.private import compiled_allocations

KIB, MIB = 1 << 10, 1 << 20


def allocate() -> Callable[..., Tensor]:
    """What code compiled for the CPU calls at this moment."""
    found = [getattr(module, name) for module, name in compiled_allocations() if "cpu" in name]
    function: Callable[..., Tensor] = found[0]
    return function


def bytes_like_compiled_code(nbytes: int) -> Tensor:
    return allocate()((nbytes,), (1,), torch.uint8)


def test_everything_is_put_back():
    resize, allocation = torch.UntypedStorage.resize_, allocate()
    with StorageTracker():
        with StorageTracker():
            pass
        assert torch.UntypedStorage.resize_ is not resize
        assert allocate() is not allocation
    assert torch.UntypedStorage.resize_ is resize
    assert allocate() is allocation


def test_allocations_of_compiled_code_count():
    with StorageTracker() as tracker:
        x = bytes_like_compiled_code(4 * KIB)
        y = x.view(2, -1).add_(1)
        assert tracker.peak_calls() == (("compiled code", 4 * KIB),)
        del x, y
        assert tracker.live_bytes == 0


def test_other_threads_are_not_followed():
    def work() -> None:
        kept.append(bytes_like_compiled_code(4 * KIB))
        kept.append(torch.empty(0))
        kept[-1].untyped_storage().resize_(4 * KIB)

    kept: list[Tensor] = []
    with StorageTracker() as tracker:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert tracker.peak_bytes == 0
    assert kept[1].untyped_storage().nbytes() == 4 * KIB


def test_a_simulated_device_refuses_them():
    with SimulatedDevice("8KiB") as device:
        x = bytes_like_compiled_code(6 * KIB)
        with pytest.raises(torch.OutOfMemoryError, match="allocate 4 KiB for compiled code"):
            bytes_like_compiled_code(4 * KIB)
        assert device.live_bytes == 6 * KIB
    del x


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # Dynamo's and inductor's own
def test_a_network_compiled_by_inductor():
    """Compiled under one tracker and run under others, counted as the CPU's allocator does."""
    network = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh())
    compiled, x = torch.compile(network), torch.randn(1024, 64)

    def update() -> None:
        network.zero_grad()
        compiled(x).pow(2).mean().backward()

    peaks = []
    for _ in range(3):
        with StorageTracker() as tracker:
            update()
        peaks.append(tracker.peak_bytes)
        network.zero_grad()
    assert peaks == peaks[:1] * 3
    assert peaks[0] == pytest.approx(allocator_peak(update)[0], abs=32 * 512)
    network.zero_grad()
    with SimulatedDevice(peaks[0]):
        update()
    network.zero_grad()
    with (
        pytest.raises(torch.OutOfMemoryError, match="for compiled code"),
        SimulatedDevice(peaks[0] // 4),
    ):
        update()
