"""Sizes as people write them, and what devices have to give."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from koila_rl.errors import ConfigurationError
from koila_rl.memory import budget
from koila_rl.memory.budget import available_bytes, budget_bytes, format_bytes, parse_bytes

GIB = 1 << 30


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("2GiB", 2 * GIB),
        ("512MiB", 512 << 20),
        ("1.5 GB", 1_500_000_000),
        (" 1 b", 1),
        ("64 kib", 65536),
        ("1_000", 1000),
        ("1,000 kB", 1_000_000),
        (".5 TiB", 1 << 39),
        (4096, 4096),
        (1, 1),
        (0.25, 250),
        (1.0, 1000),
        (1e-9, 1),
    ],
)
def test_sizes(value: str | float, expected: int):
    assert parse_bytes(value, free=1000) == expected


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (0, "memory 0 is not positive"),
        (-5, "memory -5 is not positive"),
        (0.0, r"memory 0.0 is a fraction .* in \(0, 1\]"),
        (1.5, "memory 1.5 is a fraction"),
        (float("nan"), "memory nan is a fraction"),
        (float("inf"), "memory inf is a fraction"),
        (True, "memory True is a bool"),
        (None, "memory None is a NoneType"),
        ("0 GiB", "memory '0 GiB' comes to 0 bytes"),
        ("-1GiB", "memory '-1GiB' comes to -1073741824 bytes"),
        ("2 G", "unknown unit 'g'; did you mean \"2 GiB\""),
        ("2 pigs", "unknown unit 'pigs'"),
        ("lots", "memory 'lots' is not a size"),
        ("", "memory '' is not a size"),
        ("1.2.3 GiB", "is not a size"),
    ],
)
def test_bad_sizes_are_refused_with_the_value_and_a_remedy(value: Any, says: str):
    with pytest.raises(ConfigurationError, match=says) as refusal:
        parse_bytes(value, free=1000)
    assert 'give e.g. "2GiB"' in str(refusal.value)


def test_a_fraction_needs_to_know_of_what():
    with pytest.raises(ConfigurationError, match="of what is not known"):
        parse_bytes(0.5)


@given(st.integers(0, 1 << 50))
def test_formatting_reads_back(nbytes: int):
    text = format_bytes(nbytes)
    assert len(text) <= 11
    if nbytes:
        assert parse_bytes(text) == pytest.approx(nbytes, rel=0.006)


def test_formats():
    texts = [format_bytes(n) for n in (0, 511, 1536, 1.94 * GIB, 512 << 20, 3 << 50)]
    assert texts == ["0 B", "511 B", "1.5 KiB", "1.94 GiB", "512 MiB", "3,072 TiB"]


def host(monkeypatch: pytest.MonkeyPatch, folder: Path, membership: str, **files: str) -> None:
    """A made-up machine of 16 GiB, 8 of them available, with these control-group files."""
    meminfo = folder / "meminfo"
    meminfo.write_text("MemTotal: 16777216 kB\nMemAvailable: 8388608 kB\nHugePages_Total: 0\n")
    (folder / "membership").write_text(membership)
    for name, content in files.items():
        path = folder / "groups" / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    monkeypatch.setattr(budget, "MEMINFO", meminfo)
    monkeypatch.setattr(budget, "CGROUP_MEMBERSHIP", folder / "membership")
    monkeypatch.setattr(budget, "CGROUP_ROOT", folder / "groups")


def v2(maximum: str, current: int, inactive: int, folder: str = "") -> dict[str, str]:
    return {
        f"{folder}memory.max": f"{maximum}\n",
        f"{folder}memory.current": f"{current}\n",
        f"{folder}memory.stat": f"anon 5\ninactive_file {inactive}\n",
    }


def test_host_without_limits(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    host(monkeypatch, tmp_path, "0::/\n")
    assert available_bytes("cpu") == 8 * GIB
    assert budget.total_bytes("cpu") == 16 * GIB


def test_cgroup_version_2(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    host(monkeypatch, tmp_path, "0::/\n", **v2(str(4 * GIB), 3 * GIB, GIB))
    assert available_bytes("cpu") == 2 * GIB  # cached files make way
    assert budget.total_bytes("cpu") == 4 * GIB


def test_cgroup_limits_of_parents_hold(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    own = v2("max", 0, 0, "jobs__mine__")
    parent = v2(str(2 * GIB), GIB, 0, "jobs__")
    host(monkeypatch, tmp_path, "0::/jobs/mine\n", **own, **parent)
    assert available_bytes("cpu") == GIB


def test_cgroup_version_1(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    files = {
        "memory__memory.limit_in_bytes": str(3 * GIB),
        "memory__memory.usage_in_bytes": str(2 * GIB),
        "memory__memory.stat": f"inactive_file 1\ntotal_inactive_file {GIB // 2}\n",
    }
    # The path is the host's; in here only the root of the hierarchy is mounted.
    host(monkeypatch, tmp_path, "4:cpu,memory:/docker/abc\n1:cpu:/\n", **files)
    assert available_bytes("cpu") == 3 * GIB // 2


def test_cgroup_version_1_without_limit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    files = {
        "memory__memory.limit_in_bytes": "9223372036854771712",
        "memory__memory.usage_in_bytes": "5",
        "memory__memory.stat": "",
    }
    host(monkeypatch, tmp_path, "4:memory:/\n", **files)
    assert available_bytes("cpu") == 8 * GIB


def test_never_negative(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    host(monkeypatch, tmp_path, "0::/\n", **v2(str(GIB), 2 * GIB, 0))
    assert available_bytes("cpu") == 0


def test_this_machine_answers():
    assert 0 < available_bytes("cpu") <= budget.total_bytes("cpu")


def test_budgets(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    host(monkeypatch, tmp_path, "0::/\n")
    assert budget_bytes(None, "cpu") == 8 * GIB
    assert budget_bytes(0.5, "cpu") == 4 * GIB
    assert budget_bytes("8GiB", "cpu") == 8 * GIB
    with pytest.warns(UserWarning, match="budget of 9 GiB is asked for, but cpu has 8 GiB free"):
        assert budget_bytes("9GiB", "cpu") == 9 * GIB


@pytest.mark.parametrize("device", ["cuda:97", "tpu", "cuda:x", "meta", "xpu"])
def test_devices_that_do_not_exist(device: str):
    with pytest.raises(ConfigurationError, match=device):
        available_bytes(device)


def test_an_active_simulated_device_answers_for_all():
    token = budget.active_device.set(SimpleNamespace(capacity_bytes=1000, free_bytes=300))
    try:
        assert available_bytes("cuda:97") == 300
        assert budget.total_bytes("cpu") == 1000
        assert budget_bytes(0.5, "cpu") == 150
    finally:
        budget.active_device.reset(token)


@pytest.mark.parametrize(
    ("driver_free", "fraction", "expected"),
    [
        (10 * GIB, 1.0, 10 * GIB + GIB),  # other processes hold 24 − 4 − 10
        (10 * GIB, 0.5, (12 - 4) * GIB + GIB),
        (10 * GIB, 0.1, 0),  # already above the fraction: nothing but the cache, less the margin
    ],
)
def test_arithmetic_on_made_up_cuda_figures(
    monkeypatch: pytest.MonkeyPatch, driver_free: int, fraction: float, expected: int
):
    """24 GiB in all; this process has reserved 4 of which 3 are in use. No device is involved."""
    asked: list[torch.device] = []
    stats = {"reserved_bytes.all.current": 4 * GIB, "active_bytes.all.current": 3 * GIB}

    def answer(value: Any) -> Any:
        return lambda device: (asked.append(device), value)[1]

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "mem_get_info", answer((driver_free, 24 * GIB)))
    monkeypatch.setattr(torch.cuda, "memory_stats", answer(stats))
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", answer(fraction))
    assert available_bytes("cuda:1") == max(0, expected - budget.MARGIN)
    assert set(asked) == {torch.device("cuda:1")}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_what_a_cuda_device_says_can_be_allocated():
    torch.cuda.empty_cache()
    try:
        torch.cuda.set_per_process_memory_fraction(0.25)
        free = available_bytes("cuda")
        assert free <= 0.25 * budget.total_bytes("cuda")
        held = torch.empty(free, dtype=torch.uint8, device="cuda")
        assert available_bytes("cuda") < free // 8
        del held
        assert available_bytes("cuda") == pytest.approx(free, abs=2 << 20)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
        torch.cuda.empty_cache()
