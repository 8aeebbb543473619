"""Whole scripts in TorchRL's form, with and without their one line: same parameters and curve."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import koila_rl
from tests.helpers import allow_unsplit
from tests.integrations.scripts import flat, script

SHORT: dict[str, dict[str, Any]] = {
    "ppo": {"total_frames": 96, "frames_per_batch": 48, "minibatch": 24, "epochs": 1},
    "sac": {"total_frames": 210, "frames_per_batch": 70, "updates_per_batch": 1,
            "init_random_frames": 140, "minibatch": 20},
}  # fmt: skip


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", list(SHORT))
def test_the_line_changes_nothing(name: str) -> None:
    module = script(f"torchrl_{name}")

    def run(lazy: bool, microbatch: int | None = None) -> tuple[torch.Tensor, list[float]]:
        args = module.Args(width=8, lazy=lazy, **SHORT[name])
        with koila_rl.limits(microbatch=microbatch), allow_unsplit():
            trained, curve = module.train(args)
        return flat(trained), curve

    plain, returns = run(lazy=False)
    assert returns
    for microbatch in (None, 7):
        parameters, curve = run(lazy=True, microbatch=microbatch)
        torch.testing.assert_close(parameters, plain, rtol=0, atol=1e-5)
        assert curve == returns
    plan = koila_rl.last_plan()
    assert plan is not None
    assert plan.microbatch_size == 7
