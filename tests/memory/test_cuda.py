"""Plans against what a CUDA device says; skipped where there is none."""

from __future__ import annotations

import statistics

import pytest
import torch

import koila_rl
from koila_rl.memory.budget import available_bytes
from tests.engine.networks import Case
from tests.engine.test_networks import CASES
from tests.helpers import allow_unsplit

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

NAMES = ("MLP", "Nature CNN", "IMPALA with GroupNorm", "transformer encoder", "mixture of experts",
         "dueling", "C51", "QR-DQN")  # fmt: skip


def errors(case: Case, n: int, microbatch: int) -> tuple[float, float]:
    """Relative errors of the plan against active and reserved peaks of a second run."""
    module = case.module().cuda()
    batch = [x.cuda() for x in case.batch(n)]
    for _ in range(2):
        module.zero_grad()
        torch.cuda.empty_cache()
        with koila_rl.limits(microbatch=microbatch), allow_unsplit():
            loss = case.program(module, *[koila_rl.lazy(x, batch=case.dim) for x in batch])
            before = torch.cuda.memory_stats()
            torch.cuda.reset_peak_memory_stats()
            loss.backward()
    after = torch.cuda.memory_stats()
    plan = koila_rl.last_plan()
    assert plan is not None
    active = after["active_bytes.all.peak"] - before["active_bytes.all.current"]
    reserved = after["reserved_bytes.all.peak"] - before["reserved_bytes.all.current"]
    # What is reserved comes in segments of 2 and 20 MiB, which small updates do not fill.
    segments = max(0, reserved - plan.peak_bytes - (22 << 20)) / max(reserved, 1)
    return abs(plan.peak_bytes - active) / active, segments


def test_the_plan_agrees_with_the_allocators_statistics() -> None:
    cases = [case for case in CASES if case.name in NAMES]
    found = [
        errors(case, n, microbatch)
        for case in cases
        for n in (1024, 4096)
        for microbatch in (n, n // 4)
    ]
    for kind in zip(*found, strict=True):
        assert statistics.median(kind) <= 0.01
        assert statistics.quantiles(kind, n=20)[-1] <= 0.03


def test_the_fraction_of_the_process_is_honoured() -> None:
    total = torch.cuda.mem_get_info()[1]
    before = torch.cuda.get_per_process_memory_fraction()
    try:
        torch.cuda.set_per_process_memory_fraction(0.25)
        assert available_bytes("cuda") <= total // 4
    finally:
        torch.cuda.set_per_process_memory_fraction(before)
