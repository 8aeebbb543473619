"""The tuner keeps the fastest size, whatever order the times come in."""

from __future__ import annotations

import copy

import pytest
import torch

import koila_rl
from koila_rl.engine.turns import pause, pausing
from koila_rl.memory.tuner import ROUNDS, Tuner, candidates, keeping_sizes
from tests.test_recovery import Chain, FailAt

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("fit", "n", "sizes"),
    [
        (256, 256, [256, 128, 64, 32, 16, 8, 4]),
        (300, 256, [256, 128, 64, 32, 16, 8, 4]),
        (100, 256, [100, 64, 32, 16, 8, 4, 2, 1]),
        (3, 10, [3, 2, 1]),
        (1, 10, [1]),
        (2, 2, [2, 1]),
    ],
)
def test_candidates(fit: int, n: int, sizes: list[int]) -> None:
    assert candidates(fit, n) == sizes


def test_no_two_candidates_lead_to_as_many_microbatches() -> None:
    for fit in range(1, 70):
        counts = [-(-100 // size) for size in candidates(fit, 100)]
        assert len(set(counts)) == len(counts)


def clocked(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock that goes on only where a test says so."""
    now = [0.0]
    monkeypatch.setattr("koila_rl.memory.tuner.time.perf_counter", lambda: now[0])
    return now


def test_the_fastest_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    now, tuner = clocked(monkeypatch), Tuner([64, 32, 16])
    cost = {64: 3.0, 32: 1.0, 16: 2.0}
    seen = []
    while not tuner.done:
        size = tuner.size
        # The first update of a size is slow, and the machine is slow at times.
        late = 50.0 if size not in seen else 7.0 * (len(seen) % 2)
        seen.append(size)

        def run(size: int = size, late: float = late) -> str:
            now[0] += cost[size] + late
            return "result"

        assert tuner.timed(size, CPU, run) == "result"
    assert tuner.size == 32
    assert {size: seen.count(size) for size in cost} == dict.fromkeys(cost, ROUNDS)
    assert set(seen[:3]) == set(cost)


def test_a_size_that_failed_is_out() -> None:
    tuner = Tuner([64, 32, 16])
    tuner.failed(32)
    assert list(tuner.seconds) == [16]
    tuner.failed(16)
    assert tuner.size == 1


def test_updates_stay_the_same_while_they_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    now = clocked(monkeypatch)
    module = Chain().double()
    twin = copy.deepcopy(module)
    sizes = []
    x = torch.randn(8, 3, dtype=torch.float64)
    module(x).backward()
    for _ in range(30):
        twin.zero_grad()
        with koila_rl.limits(tune=True):
            loss = twin(koila_rl.lazy(x))
            loss.backward()
        plan = koila_rl.last_plan()
        assert plan is not None
        sizes.append(plan.microbatch_size)
        assert plan.passes[0].count == -(-8 // plan.microbatch_size)
        for mine, theirs in zip(twin.parameters(), module.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad, rtol=0, atol=1e-12)
    assert set(sizes[: 4 * ROUNDS]) == {8, 4, 2, 1}
    assert len(set(sizes[4 * ROUNDS :])) == 1
    assert now == [0.0]


def test_off_plans_depend_on_shapes_and_budget_alone() -> None:
    module, x = Chain().double(), torch.randn(64, 3, dtype=torch.float64)
    sizes = set()
    for _ in range(5):
        with koila_rl.SimulatedDevice("8KiB"):
            loss = module(koila_rl.lazy(x))
            loss.backward()
        plan = koila_rl.last_plan()
        assert plan is not None
        sizes.add(plan.microbatch_size)
    assert len(sizes) == 1


def test_an_error_while_timing_leaves_the_larger_sizes_out() -> None:
    module, x = Chain().double(), torch.randn(16, 3, dtype=torch.float64)
    with koila_rl.limits(tune=True):
        loss = module(koila_rl.lazy(x))
        with FailAt(4):
            loss.backward()
        plan = koila_rl.last_plan()
        assert plan is not None
        assert (plan.microbatch_size, plan.retries) == (8, 1)
        for _ in range(5 * ROUNDS):
            module(koila_rl.lazy(x)).backward()
            plan = koila_rl.last_plan()
            assert plan is not None
            assert plan.microbatch_size <= 8


@pytest.mark.parametrize("tune", [1, "yes"])
def test_tune_is_a_flag(tune: object) -> None:
    with pytest.raises(koila_rl.ConfigurationError, match="True or False"):
        koila_rl.set_limits(tune=tune)  # type: ignore[arg-type]


def tuned_sizes(kept: dict[str, int], updates: int, n: int, sliced: bool = False) -> list[int]:
    """Microbatch sizes of the updates of a network that is new each time."""
    torch.manual_seed(0)
    module, x = Chain().double(), torch.randn(n, 3, dtype=torch.float64)
    sizes = []
    with koila_rl.limits(tune=True, memory=1 << 30), keeping_sizes(kept):
        for _ in range(updates):
            loss = module(koila_rl.lazy(x))
            if sliced:
                backward = koila_rl.start_backward(loss)
                backward.advance(backward.remaining)
                assert backward.done
            else:
                loss.backward()
            plan = koila_rl.last_plan()
            assert plan is not None
            sizes.append(plan.microbatch_size)
    return sizes


@pytest.mark.parametrize(("n", "sliced"), [(12, False), (20, True)])
def test_sizes_are_kept_and_not_timed_again(n: int, sliced: bool) -> None:
    kept: dict[str, int] = {}
    sizes = tuned_sizes(kept, 6 * ROUNDS + 1, n, sliced)
    assert len(set(sizes)) > 1
    assert list(kept.values()) == [sizes[-1]]
    name = next(iter(kept))
    assert name.startswith(f"{n}-")
    assert set(tuned_sizes({name: 3}, 3, n)) == {3}


def test_pauses_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    now, tuner = clocked(monkeypatch), Tuner([2, 1])

    def hand_over() -> None:
        now[0] += 100.0

    def run() -> None:
        pause()
        now[0] += 1.0

    with pausing(hand_over):
        tuner.timed(2, CPU, run)
    assert tuner.seconds[2] == [1.0]
