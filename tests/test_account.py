"""A run tells what its updates took, and keeps the sizes that it timed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import koila_rl
from koila_rl.account import UpdateAccount
from koila_rl.errors import ConfigurationError
from koila_rl.metrics import RunLog
from tests.environments import Counting

QUICK: dict[str, Any] = {"n_steps": 16, "batch_size": 16, "n_epochs": 1, "n_envs": 2}
CPU = torch.device("cpu")


def update(network: nn.Module, x: torch.Tensor) -> None:
    network.zero_grad()
    network(koila_rl.lazy(x)).square().sum().backward()


def test_planned_and_measured_peak_agree_on_a_simulated_device() -> None:
    network, x = nn.Linear(16, 16), torch.randn(4096, 16)
    with koila_rl.SimulatedDevice("1MiB"), koila_rl.limits(memory="256KiB"):
        account = UpdateAccount(CPU, network)
        for _ in range(2):
            update(network, x)
            plan = koila_rl.last_plan()
            found = account.add({"memory/retries": 1.0}, plan)
            assert plan is not None
            assert found["memory/microbatches"] == plan.passes[0].count > 1
            assert found["memory/planned_peak_bytes"] == plan.peak_bytes
            assert 0.9 * plan.peak_bytes <= found["memory/measured_peak_bytes"] <= plan.peak_bytes
        rows = dict(account.rows())
    assert "measured: " in rows["peak of an update"]
    assert "not measured" not in rows["peak of an update"]
    assert rows["microbatches"].endswith("2 retries")


def test_where_nothing_measures_it_says_so() -> None:
    network = nn.Linear(4, 4)
    account = UpdateAccount(CPU, network)
    update(network, torch.randn(8, 4))
    metrics = {"time/update_seconds": 3.0, "time/hidden_update_share": 0.5}
    assert "memory/measured_peak_bytes" not in account.add(metrics, koila_rl.last_plan())
    account.add({"time/update_seconds": 1.0, "time/hidden_update_share": 0.0}, None)
    rows = dict(account.rows())
    assert rows["peak of an update"].endswith("measured: not measured")
    assert rows["updates"] == "4.0 s, 38% of it beside the environment"


def test_a_run_shows_what_its_updates_took(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shown: list[str] = []
    add = RunLog.add

    def noted(self: RunLog, step: int, metrics: dict[str, float], *rest: Any) -> None:
        shown.extend(metrics)
        add(self, step, metrics, *rest)

    monkeypatch.setattr(RunLog, "add", noted)
    koila_rl.train(Counting, total_timesteps=64, run_dir=tmp_path, **QUICK)
    assert {"memory/microbatches", "memory/retries", "memory/planned_peak_bytes"} <= {*shown}
    assert {"time/update_seconds", "time/hidden_update_share"} <= {*shown}
    table = capsys.readouterr().out
    assert "not measured" in table
    assert "1 a minibatch, 0 retries" in table
    assert "0% of it beside the environment" in table


def test_tuned_sizes_are_written_and_taken_up(tmp_path: Path) -> None:
    settings = {**QUICK, "progress": False, "net_arch": (5,)}
    koila_rl.train(Counting, total_timesteps=64, run_dir=tmp_path, tune=True, **settings)
    # Two updates time nothing to an end.
    assert not (tmp_path / "tuned.json").exists()
    koila_rl.train(Counting, total_timesteps=1_500, resume=tmp_path, progress=False)
    tuned = json.loads((tmp_path / "tuned.json").read_text())
    assert all(1 <= size <= 16 for size in tuned.values())
    assert [name.split("-")[0] for name in tuned] == ["16"]
    (tmp_path / "tuned.json").write_text(json.dumps(dict.fromkeys(tuned, 3)))
    result = koila_rl.train(Counting, total_timesteps=1_600, resume=tmp_path, progress=False)
    assert result.plan is not None
    assert result.plan.microbatch_size == 3
    (tmp_path / "tuned.json").write_text("[]")
    with pytest.raises(ConfigurationError, match=r"tuned.json cannot be read"):
        koila_rl.train(Counting, total_timesteps=1_700, resume=tmp_path, progress=False)
