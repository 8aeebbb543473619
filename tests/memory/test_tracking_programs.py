"""Counted bytes of whole programs: on fakes as on real tensors, and as counted by hand."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from koila_rl.memory.storages import round_to_block
from koila_rl.memory.tracking import StorageTracker
from koila_rl.recording.private import FakeTensorMode
from tests.memory.test_tracking import BLOCK, floats


def conv_net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8 * 49, 5)
    )


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru, self.head = nn.GRU(48, 16, batch_first=True), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        features: Tensor = self.head(self.gru(x.flatten(1, 2).unflatten(1, (16, 3)).flatten(2))[0])
        return features


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layers = [nn.TransformerEncoderLayer(16, 2, 32, batch_first=True) for _ in range(2)]
        self.encoder = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        features: Tensor = self.encoder(x.flatten(2).transpose(1, 2)[..., :1].expand(-1, -1, 16))
        return features


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "mlp": lambda: nn.Sequential(nn.Flatten(), nn.Linear(768, 64), nn.Tanh(), nn.Linear(64, 4)),
    "conv": conv_net,
    "batch norm": lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.GELU()),
    "dropout": lambda: nn.Sequential(nn.Flatten(), nn.Linear(768, 99), nn.Dropout(), nn.Softmax(1)),
    "gru": Recurrent,
    "attention": Attention,
}


@pytest.mark.parametrize("name", NETWORKS)
def test_fakes_take_what_real_tensors_take(name: str):
    assert _update_bytes(NETWORKS[name], fake=True) == _update_bytes(NETWORKS[name], fake=False)


def _update_bytes(build: Callable[[], nn.Module], fake: bool) -> tuple[int, int]:
    """Peak bytes of a training step, and the bytes that stay."""
    with FakeTensorMode() if fake else torch.random.fork_rng():
        network, x = build(), torch.ones(7, 3, 16, 16)
        with StorageTracker() as tracker:
            for _ in range(2):
                network(x).pow(2).mean().backward()
        gradients = [p.grad for p in network.parameters() if p.grad is not None]
        state = sum(round_to_block(g.untyped_storage().nbytes()) for g in gradients)
        assert state <= tracker.live_bytes <= tracker.peak_bytes
        return tracker.peak_bytes, tracker.live_bytes


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["new", "view", "out of place", "in place", "drop"]), st.integers(0, 999)
    ),
    max_size=40,
)


@settings(deadline=None, max_examples=60)
@given(STEPS)
def test_any_program_agrees_with_counting_by_hand(steps: list[tuple[str, int]]):
    resident, held, peak, peak_set = floats(2), [], 0, []
    held.append(resident)
    with StorageTracker() as tracker:
        for step, number in steps:
            chosen = held[number % len(held)] if held else resident
            if step == "new":
                held.append(torch.ones(number))
            elif step == "view":
                held.append(chosen[: number // 2])
            elif step == "out of place":
                held.append(chosen + 1)
            elif step == "in place":
                chosen.mul_(2)
            elif held:
                held.pop(number % len(held))
            del chosen
            sizes = _bytes_by_hand(held, resident)
            assert tracker.live_bytes == sum(sizes)
            if sum(sizes) > peak:
                peak, peak_set = sum(sizes), sizes
    assert tracker.peak_bytes == peak
    assert sorted(call.nbytes for call in tracker.peak_calls()) == sorted(peak_set)


def _bytes_by_hand(held: list[Tensor], resident: Tensor) -> list[int]:
    """Sizes of the distinct storages of ``held`` but ``resident``'s, by their addresses in C++."""
    sizes = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in held}
    sizes.pop(resident.untyped_storage()._cdata, None)
    return [-(-size // BLOCK) * BLOCK for size in sizes.values() if size]
