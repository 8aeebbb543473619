"""Plans as people read them: a table and a picture."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import koila_rl
from koila_rl.memory.limits import limits
from tests.helpers import allow_unsplit


def sorted_loss(module: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = module(x).sort(0).values.pow(2).mean()
    return loss


@pytest.fixture
def split_plan() -> koila_rl.Plan:
    x = koila_rl.lazy(torch.ones(4096, 64))
    with limits(memory="4MiB"), allow_unsplit():
        return koila_rl.plan(nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 4))(x)
                             .pow(2).mean())  # fmt: skip


def test_the_table_names_passes_peak_budget_and_the_limit(split_plan: koila_rl.Plan) -> None:
    text = str(split_plan)
    (item,) = split_plan.passes
    assert f"{item.count} × {item.microbatch_size}" in text
    assert text.startswith(split_plan.summary())
    for part in (
        "microbatches", "forward and backward", "budget: 4 MiB", "at the peak: ", "kernels",
        "split because the whole minibatch needs",
    ):  # fmt: skip
        assert part in text
    assert item.peak_bytes == split_plan.peak_bytes
    assert split_plan.peak_bytes == split_plan.live_bytes + split_plan.workspace_bytes


def test_what_did_not_split_is_named_with_place_and_reason() -> None:
    x = koila_rl.lazy(torch.ones(512, 64))
    with limits(microbatch=64), allow_unsplit():
        text = str(koila_rl.plan(sorted_loss(nn.Linear(64, 4), x)))
    assert "on the whole minibatch:" in text
    assert "sort at " in text
    assert "test_plan.py:" in text
    assert "needs the whole minibatch" in text
    assert "split because limits(microbatch) says so" in text


def test_passes_have_their_own_peaks() -> None:
    module, x = nn.Linear(64, 128), koila_rl.lazy(torch.ones(512, 64))
    with limits(microbatch=64):
        plan = koila_rl.plan((module(x).pow(2).mean() + 1).log() * module(x).mean())
    forward, backward = plan.passes
    assert (forward.name, backward.name) == ("forward", "backward")
    assert forward.peak_bytes < backward.peak_bytes == plan.peak_bytes


def test_sums_that_a_loss_needs_first_are_a_pass_of_their_own() -> None:
    module, x = nn.Linear(64, 128), koila_rl.lazy(torch.ones(512, 64))
    with limits(microbatch=64):
        plan = koila_rl.plan((module(x) * x.mean()).pow(2).mean())
    first, second = plan.passes
    assert (first.name, second.name) == ("earlier stages", "forward and backward")
    assert 0 < first.peak_bytes < second.peak_bytes == plan.peak_bytes


def test_a_figure_is_a_picture(split_plan: koila_rl.Plan, tmp_path: Path) -> None:
    path = split_plan.figure(tmp_path / "plan.png")
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert path.stat().st_size > 10_000


def test_the_figure_shows_the_bytes_of_the_plan(
    split_plan: koila_rl.Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from matplotlib.axes import Axes

    seen: dict[str, object] = {}
    monkeypatch.setattr(Axes, "annotate", lambda _, text, *a, **k: seen.update(text=text))
    monkeypatch.setattr(Axes, "axhline", lambda _, y, **k: seen.update(budget=y))
    split_plan.figure(tmp_path / "plan.png")
    assert seen["budget"] == 4
    assert str(seen["text"]).startswith("peak ")
    assert str(split_plan.trace().calls[0]) in str(seen["text"])
