"""What a repeat costs: no fake tensor, no plan, calls in proportion, and no memory."""

from __future__ import annotations

import gc
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import koila_rl
from koila_rl.engine import binding, recognition
from koila_rl.memory import choose
from koila_rl.recording.private import FakeTensor
from koila_rl.recording.recorder import analyses, forget_analyses
from tests.helpers import allow_unsplit


@contextmanager
def counting(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, int]]:
    """Fake tensors made, plans chosen and calls analysed inside the block."""
    counts = {"fakes": 0, "plans": 0, "analyses": -analyses()}
    new, plan = FakeTensor.__new__, choose._plan

    def made(*args: Any, **kwargs: Any) -> Any:
        counts["fakes"] += 1
        return new(*args, **kwargs)

    def planned(*args: Any, **kwargs: Any) -> Any:
        counts["plans"] += 1
        return plan(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(FakeTensor, "__new__", staticmethod(made))
        patch.setattr(choose, "_plan", planned)
        yield counts
    counts["analyses"] += analyses()


class SoftActorCritic(nn.Module):
    """SAC's networks and temperature, small."""

    def __init__(self) -> None:
        super().__init__()
        self.actor = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 4))
        self.critics = nn.ModuleList(nn.Sequential(nn.Linear(5, 8), nn.Linear(8, 1)) for _ in "ab")
        self.log_alpha = nn.Parameter(torch.zeros(()))
        parts = (self.actor, self.critics)
        self.optimizers = [torch.optim.Adam(part.parameters(), lr=1e-3) for part in parts]
        self.optimizers.append(torch.optim.Adam([self.log_alpha], lr=1e-3))

    def act(self, x: Tensor) -> tuple[Tensor, Tensor]:
        mean, log_std = self.actor(x).chunk(2, -1)
        normal = torch.distributions.Normal(mean, log_std.clamp(-5, 2).exp())
        raw = normal.rsample()
        action = raw.tanh()
        log_prob = normal.log_prob(raw) - (1 - action.pow(2) + 1e-6).log()
        return action, log_prob.sum(-1, keepdim=True)

    def value(self, x: Tensor, action: Tensor) -> Tensor:
        values = [critic(torch.cat([x, action], -1)) for critic in self.critics]
        return torch.min(*values)

    def update(self, batch: dict[str, Tensor]) -> None:
        """The losses of critics, actor and temperature, one after the other."""
        with torch.no_grad():
            action, log_prob = self.act(batch["next"])
            value = self.value(batch["next"], action) - self.log_alpha.exp() * log_prob
            target = batch["reward"] + 0.99 * value
        pair = torch.cat([batch["x"], batch["action"]], -1)
        losses = [F.mse_loss(critic(pair), target) for critic in self.critics]
        self.step(1, losses[0] + losses[1])
        action, log_prob = self.act(batch["x"])
        value = self.value(batch["x"], action)
        self.step(0, (self.log_alpha.exp().detach() * log_prob - value).mean())
        self.step(2, -(self.log_alpha * (log_prob + 2.0).detach()).mean())

    def step(self, which: int, loss: Tensor) -> None:
        self.optimizers[which].zero_grad()
        loss.backward()
        self.optimizers[which].step()


def transitions(n: int) -> dict[str, Tensor]:
    return {"x": torch.randn(n, 3), "next": torch.randn(n, 3), "action": torch.randn(n, 2),
            "reward": torch.randn(n, 1)}  # fmt: skip


def regression(sizes: tuple[int, ...]) -> Callable[[], None]:
    network = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.Adam(network.parameters())

    def turn() -> None:
        for n in sizes:
            x = koila_rl.lazy(torch.randn(n, 3))
            optimizer.zero_grad()
            loss = F.mse_loss(network(x).squeeze(-1), x[:, 0])
            loss.item()
            loss.backward()
            optimizer.step()

    return turn


def soft_actor_critic() -> Callable[[], None]:
    learner = SoftActorCritic()
    return lambda: learner.update(koila_rl.lazy(transitions(64)))


TURNS: dict[str, Callable[[], Callable[[], None]]] = {
    "one minibatch": lambda: regression((64,)),
    "minibatches of 256 and 37 in turn": lambda: regression((256, 37)),
    "three losses": soft_actor_critic,
}


@pytest.mark.parametrize("microbatch", [None, 16])
@pytest.mark.parametrize("name", TURNS)
def test_a_repeat_makes_no_fake_tensor_and_no_plan(
    monkeypatch: pytest.MonkeyPatch, name: str, microbatch: int | None
) -> None:
    turn = TURNS[name]()
    # Other tests may have met the same calls and programs.
    forget_analyses()
    binding._PROGRAMS.clear()
    recognition.forget()
    with koila_rl.limits(microbatch=microbatch), allow_unsplit():
        with counting(monkeypatch) as first:
            turn()
        assert first["fakes"] > 0
        assert first["plans"] > 0
        for _ in range(3):
            turn()
        with counting(monkeypatch) as repeats:
            for _ in range(3):
                turn()
    assert repeats == {"fakes": 0, "plans": 0, "analyses": 0}


def calls_of(function: Callable[[], Any]) -> int:
    """Python functions called, in any thread of this one's."""
    count = 0

    def note(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


def test_recording_and_running_are_linear_in_calls() -> None:
    def cost(layers: int) -> int:
        network = nn.Sequential(*(nn.Linear(4, 4) for _ in range(layers)))
        x = torch.randn(6, 4)

        def update() -> None:
            network(koila_rl.lazy(x)).pow(2).mean().backward()

        with koila_rl.limits(microbatch=3):
            for _ in range(4):
                update()
            gc.collect()
            gc.disable()
            try:
                return calls_of(update)
            finally:
                gc.enable()

    ratio = cost(1000) / cost(100)
    assert 8.0 < ratio < 12.0, ratio


def growth(updates: int, turn: Callable[[], None]) -> tuple[int, int]:
    """Bytes and objects that stay after some updates, caches filled before."""
    tracemalloc.start()
    # What was made before counts for nothing, so it must have been replaced first.
    for _ in range(updates // 2):
        turn()
    gc.collect()
    before, count = tracemalloc.get_traced_memory()[0], len(gc.get_objects())
    for _ in range(updates):
        turn()
    gc.collect()
    after, later = tracemalloc.get_traced_memory()[0], len(gc.get_objects())
    tracemalloc.stop()
    return after - before, later - count


@pytest.mark.parametrize("updates", [60, pytest.param(10_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", TURNS)
def test_memory_is_flat(name: str, updates: int) -> None:
    turn = TURNS[name]()
    ema = {"loss": torch.zeros(())}

    def with_average() -> None:
        turn()
        x = koila_rl.lazy(torch.randn(8, 3))
        ema["loss"] = 0.99 * ema["loss"] + 0.01 * x.mean().item()

    nbytes, objects = growth(updates, with_average)
    assert nbytes < 64_000
    assert objects < 200
