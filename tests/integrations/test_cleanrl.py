"""Scripts in CleanRL's form, with and without their one line: same parameters, same curve."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import koila_rl
from tests.helpers import allow_unsplit
from tests.integrations.scripts import flat, script

SHORT: dict[str, dict[str, Any]] = {
    "ppo": {"total_timesteps": 192, "num_steps": 16, "update_epochs": 1},
    "ppo_continuous": {"total_timesteps": 1024, "num_steps": 128, "update_epochs": 1,
                       "num_minibatches": 2, "target_kl": 0.5},
    "ppo_lstm": {"total_timesteps": 192, "num_steps": 8, "update_epochs": 1},
    "dqn": {"total_timesteps": 120, "learning_starts": 60, "batch_size": 24,
            "train_frequency": 10, "target_network_frequency": 20},
    "c51": {"total_timesteps": 120, "learning_starts": 60, "batch_size": 24, "n_atoms": 11,
            "train_frequency": 10, "target_network_frequency": 20},
    "sac": {"total_timesteps": 206, "learning_starts": 199, "batch_size": 24},
}  # fmt: skip

QUICK = ("ppo_lstm", "c51", "sac")


@pytest.mark.parametrize(
    "name",
    [pytest.param(x, marks=() if x in QUICK else pytest.mark.slow) for x in SHORT],
)
def test_the_line_changes_nothing(name: str) -> None:
    module = script(f"cleanrl_{name}")

    def run(lazy: bool, microbatch: int | None = None) -> tuple[torch.Tensor, list[float]]:
        args = module.Args(width=8, lazy=lazy, **SHORT[name])
        with koila_rl.limits(microbatch=microbatch), allow_unsplit():
            trained, curve = module.train(args)
        return flat(trained), curve

    plain, returns = run(lazy=False)
    assert returns
    for microbatch in (None, 3):
        parameters, curve = run(lazy=True, microbatch=microbatch)
        torch.testing.assert_close(parameters, plain, rtol=0, atol=1e-5)
        # Continuous actions follow the parameters, which agree to rounding, not to the bit.
        assert curve == pytest.approx(returns, rel=1e-6)
    plan = koila_rl.last_plan()
    assert plan is not None
    assert plan.microbatch_size == 3
    assert plan.split
