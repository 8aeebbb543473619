"""The size chosen against the largest that really fits, found by trying on simulated devices."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import koila_rl
from koila_rl.engine.binding import bind
from koila_rl.errors import UnsupportedError
from koila_rl.memory import choose as choosing
from koila_rl.memory.choose import choose, device_of
from koila_rl.memory.estimate import Estimate
from koila_rl.memory.lines import Lines
from koila_rl.memory.live import Moment
from koila_rl.memory.simulated import SimulatedDevice
from tests.engine.networks import Case
from tests.engine.test_networks import CASES
from tests.helpers import allow_unsplit
from tests.memory.test_estimate import STAGED

N = 256
NAMES = ("MLP", "Nature CNN", "IMPALA with GroupNorm", "transformer encoder",
         "mixture of experts", "over the deviation")  # fmt: skip
NETWORKS = {case.name: case for case in [*CASES, *STAGED] if case.name in NAMES}


class Trial:
    """One network on devices of any capacity, with all that is resident registered."""

    def __init__(self, case: Case, n: int) -> None:
        torch.manual_seed(0)
        self.case, self.n = case, n
        self.module, self.batch = case.module(), case.batch(n)
        self.held = (self.module, *self.batch)
        self.peaks: dict[int, int] = {}

    def update(self, capacity: int, microbatch: int | None) -> tuple[koila_rl.Plan, int]:
        """One update; the plan and the peak above what was resident when it began."""
        self.module.zero_grad()
        device = SimulatedDevice(capacity).register(*self.held)
        with device, koila_rl.limits(microbatch=microbatch), allow_unsplit():
            lazy = [koila_rl.lazy(x) for x in self.batch]
            loss = self.case.program(self.module, *lazy)
            before = device.live_bytes
            device.reset_peak()
            loss.backward()
        plan = koila_rl.last_plan()
        assert plan is not None
        return plan, device.peak_bytes - before

    def resident(self) -> int:
        """What is held, and what the program makes while it is recorded."""
        self.module.zero_grad()
        with SimulatedDevice("1TiB").register(*self.held) as device, allow_unsplit():
            lazy = [koila_rl.lazy(x) for x in self.batch]
            loss = self.case.program(self.module, *lazy)
            assert isinstance(loss, Tensor)
            return device.live_bytes

    def peak(self, microbatch: int) -> int:
        if microbatch not in self.peaks:
            self.peaks[microbatch] = self.update(1 << 40, microbatch)[1]
        return self.peaks[microbatch]

    def largest(self, free: int) -> int:
        """The largest microbatch whose real run takes no more than is free."""
        if self.peak(self.n) <= free:
            return self.n
        low, high = 0, self.n
        while high - low > 1:
            middle = (low + high) // 2
            if self.peak(middle) <= free:
                low = middle
            else:
                high = middle
        return low


@pytest.fixture(autouse=True)
def _quiet() -> Any:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="a simulated device of")
        yield


def hold(name: str, n: int, shares: list[float]) -> None:
    trial = Trial(NETWORKS[name], n)
    one, whole, resident = trial.peak(1), trial.peak(n), trial.resident()
    for share in shares:
        free = one + int(share * (whole - one))
        best = trial.largest(free)
        plan, peak = trial.update(resident + free, None)
        assert plan.retries == 0
        assert plan.parts == 1
        assert peak <= free
        assert plan.fit >= 0.97 * best - 0.5, (share, plan.fit, best)
        assert plan.passes[0].count == -(-n // plan.fit)


@pytest.mark.parametrize("name", ["MLP", "Nature CNN"])
def test_finds_the_largest_microbatch_that_fits(name: str) -> None:
    hold(name, 100, [0.0, 0.13, 0.6, 1.0])


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", NAMES)
def test_finds_the_largest_microbatch_that_fits_at_fifty_capacities(name: str) -> None:
    hold(name, N, [k / 49 for k in range(50)])


def program_of(module: nn.Module, x: Tensor) -> Any:
    node = module(koila_rl.lazy(x)).pow(2).mean()._node
    return bind([node], node)


def counted_traces(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    sizes: list[int] = []
    real = choosing.estimate

    def counting(*args: Any) -> Any:
        sizes.append(args[3])
        return real(*args)

    monkeypatch.setattr(choosing, "estimate", counting)
    return sizes


def test_a_plan_takes_at_most_four_traces_and_a_known_program_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes = counted_traces(monkeypatch)
    module, x = (
        nn.Sequential(nn.Linear(64, 520), nn.ReLU(), nn.Linear(520, 4)),
        torch.ones(4096, 64),
    )
    with koila_rl.limits(memory="4MiB"):
        first = choose(program_of(module, x), "backward")
        assert first.peak_bytes <= 4 << 20
        assert 2 <= len(sizes) <= 4
        assert first.split
        del sizes[:]
        again = choose(program_of(module, x), "backward")
    assert again is first
    with koila_rl.limits(memory=(4 << 20) + 512):
        other = choose(program_of(module, x), "backward")
    assert other.microbatch_size == first.microbatch_size
    assert other.budget_bytes == (4 << 20) + 512
    assert sizes == []


def test_what_fits_many_times_over_is_not_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = counted_traces(monkeypatch)
    with koila_rl.limits(memory="1GiB"):
        plan = choose(program_of(nn.Linear(8, 8), torch.ones(100, 8)), "backward")
    assert not plan.split
    assert sizes == []
    assert plan.peak_bytes > 0
    assert sizes == [100]


class Normalised(nn.Module):
    """Wide layers with batch statistics between them: a split holds every layer's input."""

    def __init__(self) -> None:
        super().__init__()
        layers = [x for _ in range(6) for x in (nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU())]
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        features: Tensor = self.layers(x)
        return features


def test_where_a_split_needs_more_than_the_whole_the_whole_runs_or_both_are_named() -> None:
    module, x = Normalised(), torch.ones(64, 64)
    with koila_rl.limits(memory="1GiB"):
        whole = choose(program_of(module, x), "backward").peak_bytes
    with koila_rl.limits(microbatch=1), allow_unsplit():
        one = choose(program_of(module, x), "backward").peak_bytes
    assert one > whole
    with koila_rl.limits(memory=whole):
        assert not choose(program_of(module, x), "backward").split
    with (
        koila_rl.limits(memory=whole - 512),
        pytest.raises(
            koila_rl.InsufficientMemoryError, match=r"whole minibatch needs .*, and in microb"
        ),
    ):
        choose(program_of(module, x), "backward")


def test_one_device_a_program() -> None:
    cpu, first, second = (torch.device(name) for name in ("cpu", "cuda:0", "cuda:1"))
    assert device_of([cpu, cpu]) == device_of([]) == cpu
    assert device_of([cpu, first, cpu]) == first
    with pytest.raises(UnsupportedError, match="lie on cuda:0 and cuda:1"):
        device_of([first, cpu, second])


def test_tensors_on_two_devices_are_refused_as_in_eager() -> None:
    module = nn.Linear(8, 8, device="meta")
    x = torch.ones(4, 8)
    with pytest.raises(RuntimeError, match="device") as eager:
        module(x)
    with allow_unsplit(), pytest.raises(RuntimeError) as lazy:
        module(koila_rl.lazy(x)).sum().backward()
    assert str(lazy.value) == str(eager.value)


def moments(sizes: dict[int, list[int]]) -> Estimate:
    timeline = [Moment(nbytes, 0, k, phase) for phase, taken in sizes.items()
                for k, nbytes in enumerate(taken)]  # fmt: skip
    return Estimate(0, 0, (), tuple(timeline))


def test_lines_by_hand() -> None:
    """A gradient of 100 bytes stays after the first microbatch; one moment takes 10 a sample."""
    lines = Lines.of(2, 4, moments({0: [40, 7], 1: [120, 107], 2: [140, 107], -1: [50]}))
    assert lines is not None
    assert lines.peak(3, 100) == 130
    assert lines.peak(80, 100) == max(80 * 10, 20 * 10 + 100)
    assert lines.peak(90, 100) == 900
    assert lines.largest(100, 130) == 3
    assert lines.largest(100, 900) == 90
    assert lines.largest(100, 100) == 0
    assert Lines.of(2, 4, moments({0: [40], 1: [120, 107], 2: [140]})) is None
