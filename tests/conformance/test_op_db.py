"""A sample of PyTorch's operator database on every run, all of it when asked for."""

from __future__ import annotations

from typing import Any

import pytest

import koila_rl
from tests.conformance.op_db import Settings, Verdict, findings, name_of, operators

BAD = {Verdict.WRONG, Verdict.ERROR}
EVERY = operators()
SOME = EVERY[::16]


def hold(operator: Any, settings: Settings) -> None:
    bad = [str(f) for f in findings(operator, settings) if f.verdict in BAD]
    assert not bad, "\n".join(bad)


@pytest.mark.parametrize("operator", SOME, ids=name_of)
def test_some_operators_are_as_eager(operator: Any) -> None:
    hold(operator, Settings(samples=1))


@pytest.mark.slow
@pytest.mark.parametrize("operator", EVERY, ids=name_of)
@pytest.mark.parametrize(
    "settings",
    [Settings(), Settings(dim=1), Settings(samples=20, microbatch=1), Settings(inplace=True)],
    ids=["few", "second dimension", "many, one by one", "in place"],
)
def test_every_operator_is_as_eager(operator: Any, settings: Settings) -> None:
    hold(operator, settings)


def test_the_judge_sees_a_wrong_value(monkeypatch: pytest.MonkeyPatch) -> None:
    (operator,) = (o for o in EVERY if name_of(o) == "cumsum")
    monkeypatch.setattr(koila_rl, "lazy", lambda tensor, batch=0: tensor * 2)
    assert Verdict.WRONG in {f.verdict for f in findings(operator, Settings())}
