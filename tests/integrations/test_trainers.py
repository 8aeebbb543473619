"""Lightning Fabric, accelerate and a GRPO loop, with and without the line."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from torch import Tensor

import koila_rl
from tests.helpers import allow_unsplit, double_precision
from tests.integrations.scripts import flat, script


def trained(name: str, lazy: bool, microbatch: int | None = None, **settings: Any) -> Any:
    module = script(name)
    # Or the precision of the first test would be that of all.
    AcceleratorState._reset_state(reset_partial_state=True)
    with koila_rl.limits(microbatch=microbatch), allow_unsplit():
        model, curve = module.train(module.Args(lazy=lazy, **settings))
    return flat(model), curve


@pytest.mark.parametrize("name", ["fabric_loop", "accelerate_loop"])
def test_trainers_in_full_precision(name: str) -> None:
    short = {"minibatch": 23, "updates": 3, "width": 8}
    plain, losses = trained(name, lazy=False, **short)
    for microbatch in (None, 5):
        parameters, found = trained(name, lazy=True, microbatch=microbatch, **short)
        torch.testing.assert_close(parameters, plain, rtol=0, atol=1e-5)
        assert found == pytest.approx(losses, rel=1e-5)
    plan = koila_rl.last_plan()
    assert plan is not None
    assert plan.microbatch_size == 5


@pytest.mark.parametrize(
    ("name", "precision"), [("fabric_loop", "bf16-mixed"), ("accelerate_loop", "bf16")]
)
def test_trainers_in_mixed_precision(name: str, precision: str) -> None:
    short = {"minibatch": 23, "updates": 3, "width": 8, "precision": precision}
    plain, losses = trained(name, lazy=False, **short)
    exact, _ = trained(name, lazy=False, minibatch=23, updates=3, width=8)
    whole, found = trained(name, lazy=True, **short)
    torch.testing.assert_close(whole, plain, rtol=0, atol=1e-6)
    assert found == pytest.approx(losses, rel=1e-6)
    split, found = trained(name, lazy=True, microbatch=5, **short)
    # bfloat16 rounds what is added up; the order differs, the size of the error does not.
    assert (split - exact).norm() < 3 * (plain - exact).norm()
    assert found == pytest.approx(losses, rel=2e-2)
    assert (plain - exact).norm() > 0


SHORT = {"updates": 3, "prompts": 3, "group": 4, "width": 8}


# In float64: of a key's bias the true gradient is zero, and Adam makes steps of its rounding.
def grpo(lazy: bool, microbatch: int | None = None, **settings: Any) -> Any:
    with double_precision():
        return trained("grpo", lazy=lazy, microbatch=microbatch, **settings)


def test_grpo_is_the_same_split_or_not() -> None:
    plain, curve = grpo(lazy=False, **SHORT)
    for microbatch in (None, 5):
        parameters, rewards = grpo(lazy=True, microbatch=microbatch, **SHORT)
        torch.testing.assert_close(parameters, plain, rtol=0, atol=1e-9)
        assert rewards == curve
    plan = koila_rl.last_plan()
    assert plan is not None
    assert plan.unsplit == ()


def test_a_group_too_large_for_the_device_trains() -> None:
    def run(lazy: bool, capacity: str) -> Tensor:
        with koila_rl.SimulatedDevice(capacity):
            found, _ = grpo(lazy, updates=1, prompts=1, group=128, length=4, width=16, epochs=1)
        return found

    plain = run(lazy=False, capacity="1GiB")
    with pytest.raises(torch.OutOfMemoryError):
        run(lazy=False, capacity="2MiB")
    torch.testing.assert_close(run(lazy=True, capacity="2MiB"), plain, rtol=0, atol=1e-9)
    plan = koila_rl.last_plan()
    assert plan is not None
    assert plan.split
