"""A device of any size on the CPU: what counts, when it is full, and what still works inside."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import koila_rl
from koila_rl.errors import ConfigurationError
from koila_rl.memory.budget import available_bytes, budget_bytes
from koila_rl.memory.simulated import SimulatedDevice
from koila_rl.recording.private import FakeTensorMode

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


def kib(n: int) -> Tensor:
    """A new tensor of ``n`` KiB."""
    return torch.ones(n * KIB // 4)


def test_is_full_at_the_call_that_passes_the_capacity():
    with SimulatedDevice("8KiB") as device:
        x = kib(4)
        y = x + 1
        assert (device.live_bytes, device.free_bytes) == (8 * KIB, 0)
        assert "for aten.mul.Tensor" in refusal_of_doubling(x[:1])
        assert device.live_bytes == device.peak_bytes == 8 * KIB
        del y
        assert refusal_of_doubling(x) == "no refusal"


def refusal_of_doubling(x: Tensor) -> str:
    # Not in pytest.raises(), which keeps the caller's variables alive.
    try:
        x * 2
    except torch.OutOfMemoryError as error:
        return str(error)
    return "no refusal"


def test_the_message_is_of_pytorchs_kind():
    with SimulatedDevice("10MiB"):
        x = torch.ones(2 * MIB)
        with pytest.raises(torch.OutOfMemoryError) as refusal:
            x * 2
    assert refusal.value.args == (
        "CUDA out of memory. Tried to allocate 8 MiB for aten.mul.Tensor. SimulatedDevice has a "
        "total capacity of 10 MiB of which 2 MiB is free. 8 MiB is allocated by PyTorch.",
    )


def update(network: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    optimizer.zero_grad()
    network(x).pow(2).mean().backward()
    optimizer.step()


def test_training_needs_exactly_its_peak():
    """Parameters, optimizer state, gradients and activations, to the block."""
    peak = train_on("1GiB")
    assert train_on(peak) == peak
    with pytest.raises(torch.OutOfMemoryError):
        train_on(peak - 512)


def train_on(capacity: str | int) -> int:
    network = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 8))
    optimizer = torch.optim.Adam(network.parameters())
    parameters = sum(p.numel() * 4 for p in network.parameters())  # all in whole blocks but one
    with SimulatedDevice(capacity).register(network, optimizer) as device:
        for _ in range(2):
            update(network, optimizer, torch.ones(128, 64))
        assert device.resident_bytes == parameters - 8 * 4 + 512
        assert device.peak_bytes > 4 * parameters
        assert device.peak_calls()[0].nbytes == 128 * 256 * 4
    return device.peak_bytes


def test_registering_counts_parameters_gradients_buffers_and_state_once():
    network = nn.BatchNorm1d(128)
    optimizer = torch.optim.Adam(network.parameters())
    update(network, optimizer, torch.randn(4, 128))
    device = SimulatedDevice("1MiB").register(network, optimizer)
    # Weight and bias with gradient and two moments each, running mean and variance, and the
    # counts of steps (one a parameter) and of minibatches.
    assert device.resident_bytes == (2 * 4 + 2 + 2 + 1) * 512
    assert device.register(network, network.weight) is device
    assert device.resident_bytes == (2 * 4 + 2 + 2 + 1) * 512
    with device:
        network.weight.grad = None
        assert device.live_bytes == device.resident_bytes - 512


def test_what_was_not_registered_counts_zero_and_is_said():
    x, unused = kib(512), kib(512)
    with SimulatedDevice("1MiB") as device:
        y = x[: 16 * KIB] + 1
        assert device.live_bytes == 64 * KIB
    assert device.unregistered_bytes == 512 * KIB
    assert str(device) == (
        "SimulatedDevice of 1 MiB: peak 64 KiB, 0 B registered; 512 KiB that existed at entry, "
        "or that no operator made, count zero"
    )
    assert "at entry" not in str(SimulatedDevice("1MiB").register(x, unused))
    del y


def test_registering_more_than_there_is():
    with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate 5 KiB for registered"):
        SimulatedDevice("4KiB").register(kib(5))
    with pytest.raises(ConfigurationError, match="cannot register a list"):
        SimulatedDevice("4KiB").register([kib(1)])  # type: ignore[arg-type]


def test_out_of_memory_in_backward_leaves_the_device_usable():
    x = kib(4).requires_grad_()
    with SimulatedDevice("10KiB") as device:
        loss = x.exp().sum()  # 4.5 KiB; backward needs 4 for the product and keeps 4 for exp
        extra = kib(4)
        with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
            loss.backward()
        assert x.grad is None
        del loss, extra
        x.exp().sum().backward()
        assert x.grad is not None
    assert torch.allclose(x.grad, x.exp())
    assert device.peak_bytes <= 10 * KIB


def test_fragmentation_counts_with_the_allocator():
    for allocator, fits in [(False, True), (True, False)]:
        with SimulatedDevice("40MiB", allocator=allocator) as device:
            held = [torch.empty(5 * MIB, dtype=torch.uint8) for _ in range(8)]
            del held[::2]
            assert device.live_bytes == 20 * MIB
            assert device.free_bytes == (0 if allocator else 20 * MIB)
            if fits:
                held.append(torch.empty(10 * MIB, dtype=torch.uint8))
                continue
            with pytest.raises(torch.OutOfMemoryError, match="20 MiB is reserved by PyTorch but"):
                torch.empty(10 * MIB, dtype=torch.uint8)
            assert device.reserved_bytes == 40 * MIB
            assert "at most 40 MiB reserved" in str(device)


def test_expandable_segments_avoid_fragmentation_between_segments():
    for expandable, reserved in [(False, 60), (True, 40)]:
        device = SimulatedDevice("64MiB", allocator=True, expandable_segments=expandable)
        with device:
            for size in (20, 40):
                torch.empty(size * MIB, dtype=torch.uint8)
        assert device.reserved_bytes == reserved * MIB
    with pytest.raises(ConfigurationError, match="needs allocator=True"):
        SimulatedDevice("64MiB", expandable_segments=True)


def test_answers_for_the_budget_while_active():
    outside = available_bytes("cpu")
    with SimulatedDevice("8MiB") as outer:
        x = kib(1024)
        assert available_bytes("cuda") == outer.free_bytes == 7 * MIB
        with SimulatedDevice("2MiB"):
            y = kib(512)
            assert available_bytes("cpu") == 3 * MIB // 2
        assert budget_bytes(0.5, "cpu") == (8 * MIB - 3 * MIB // 2) // 2
        with pytest.warns(UserWarning, match="a budget of 1 GiB is asked for, but cpu has 6.5 MiB"):
            budget_bytes("1GiB", "cpu")
    assert available_bytes("cpu") > outside // 2
    del x, y


def test_larger_than_the_machine_warns_with_both_numbers():
    with pytest.warns(UserWarning, match=r"simulated device of 1,024 TiB is larger than .* GiB"):
        SimulatedDevice(1 << 50)


def test_capacities_are_checked():
    with pytest.raises(ConfigurationError, match="'tiny' is not a size"):
        SimulatedDevice("tiny")


def test_is_left_even_by_an_error_and_not_entered_twice():
    device = SimulatedDevice("1MiB")
    with pytest.raises(RuntimeError, match="mine"), device:
        raise RuntimeError("mine")
    assert available_bytes("cpu") > MIB
    with device, pytest.raises(ConfigurationError, match="active already"), device:
        pass
    kib(2048)


def test_planning_inside_on_fake_tensors_takes_nothing():
    with SimulatedDevice("4KiB") as device:
        with FakeTensorMode():
            x = torch.ones(GIB) * 2
        assert device.peak_bytes == 0
    del x


def test_other_threads_are_not_followed():
    with SimulatedDevice("4KiB") as device:
        thread = threading.Thread(target=kib, args=(64,))
        thread.start()
        thread.join()
    assert device.peak_bytes == 0


@pytest.mark.filterwarnings("ignore")  # Dynamo's own deprecations
def test_compiled_code_stays_compiled():
    graphs = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    network = nn.Linear(64, 64)
    compiled = torch.compile(network, backend=backend)
    with SimulatedDevice("1MiB").register(network) as device:
        for _ in range(3):
            compiled(torch.ones(16, 64)).sum().backward()
    assert len(graphs) == 1
    assert device.peak_bytes > device.resident_bytes + 16 * 64 * 4


def test_stable_baselines3_learns_inside():
    sb3 = pytest.importorskip("stable_baselines3")
    agent = sb3.PPO("MlpPolicy", "CartPole-v1", n_steps=64, batch_size=32, device="cpu", seed=0)
    with SimulatedDevice("4MiB").register(agent.policy, agent.policy.optimizer) as device:
        agent.learn(128)
    assert device.resident_bytes < device.peak_bytes < 4 * MIB
    with (
        pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"),
        SimulatedDevice(device.resident_bytes + 2048).register(agent.policy),
    ):
        agent.learn(128)


def test_this_trains_on_a_2_gb_card() -> None:
    n = 50_000
    network = nn.Sequential(nn.Linear(8, 4096), nn.Tanh(), nn.Linear(4096, 4))
    optimizer = torch.optim.SGD(network.parameters(), lr=1e-3)
    x = torch.ones(n, 8)
    with SimulatedDevice("2GB").register(network, optimizer, x) as device:
        network(koila_rl.lazy(x)).pow(2).mean().backward()
        optimizer.step()
    plan = koila_rl.last_plan()
    assert plan is not None
    assert (plan.split, plan.retries) == (True, 0)
    assert 0.5 * device.capacity_bytes < device.peak_bytes <= device.capacity_bytes


def test_trains_inside(tmp_path: Path) -> None:
    with SimulatedDevice("700KiB") as device:
        result = koila_rl.train(
            "CartPole-v1", total_timesteps=512, n_steps=512, n_envs=1, batch_size=512,
            n_epochs=1, device="cpu", run_dir=tmp_path / "run", progress=False,
        )  # fmt: skip
    assert result.plan is not None
    assert result.plan.split
    assert result.plan.retries == 0
    assert result.plan.peak_bytes < device.peak_bytes <= device.capacity_bytes


def test_a_section_has_a_peak_of_its_own() -> None:
    with SimulatedDevice("1MiB") as device:
        kib(64)
        device.start_section()
        kib(16)
        assert device.section_peak_bytes == 16 * KIB
        assert device.peak_bytes == 64 * KIB
        device.reset_peak()
        assert device.peak_bytes == 0


def test_planning_follows_the_allocator_where_it_is_modelled() -> None:
    network, x = nn.Linear(64, 512), torch.ones(8192, 64)
    with SimulatedDevice("24MiB", allocator=True).register(network, x) as device:
        network(koila_rl.lazy(x)).pow(2).mean().backward()
    plan = koila_rl.last_plan()
    assert plan is not None
    assert plan.split
    assert device.reserved_bytes <= device.capacity_bytes
