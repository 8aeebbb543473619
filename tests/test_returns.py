"""GAE and n-step targets against hand computations and a plain reference."""

from __future__ import annotations

import pytest
import torch

from koila_rl.returns import bootstrap_rows, generalized_advantage, n_step_target

T, F = True, False


def column(*values: float | bool) -> torch.Tensor:
    if isinstance(values[0], bool):
        return torch.tensor(values).reshape(-1, 1)
    return torch.tensor(values, dtype=torch.float64).reshape(-1, 1)


def test_gae_by_hand() -> None:
    advantage, target = generalized_advantage(
        column(1.0, 2.0, 3.0),
        column(0.5, 1.0, 1.5),
        column(1.0, 1.5, 2.0),
        column(F, F, F),
        column(F, F, F),
        gamma=0.9,
        gae_lambda=0.8,
    )
    # delta = 1.4, 2.35, 3.3; A2 = 3.3; A1 = 2.35 + .72 * 3.3; A0 = 1.4 + .72 * A1
    expected = column(1.4 + 0.72 * 4.726, 4.726, 3.3)
    torch.testing.assert_close(advantage, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(target, expected + column(0.5, 1.0, 1.5), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("terminated", "truncated", "expected"), [(F, T, 10.0), (T, F, 1.0), (T, T, 1.0)]
)
def test_truncation_bootstraps_and_termination_does_not(
    terminated: bool, truncated: bool, expected: float
) -> None:
    _, target = generalized_advantage(
        column(1.0),
        column(3.0),
        column(10.0),
        column(terminated),
        column(truncated),
        gamma=0.9,
        gae_lambda=0.95,
    )
    torch.testing.assert_close(target, column(expected))


@pytest.mark.parametrize("ends", [(T, F), (F, T)])
def test_no_advantage_leaks_into_the_episode_before(ends: tuple[bool, bool]) -> None:
    def run(later_reward: float) -> torch.Tensor:
        advantage, _ = generalized_advantage(
            column(1.0, 1.0, later_reward),
            column(0.0, 0.0, 0.0),
            column(0.0, 2.0, 0.0),
            column(F, ends[0], F),
            column(F, ends[1], F),
            gamma=0.9,
            gae_lambda=0.9,
        )
        return advantage

    torch.testing.assert_close(run(0.0)[:2], run(1000.0)[:2], rtol=0, atol=0)


def test_lambda_one_gives_discounted_returns() -> None:
    reward = torch.rand(7, 3, dtype=torch.float64)
    value = torch.rand(7, 3, dtype=torch.float64)
    last = torch.rand(1, 3, dtype=torch.float64)
    never = torch.zeros(7, 3, dtype=torch.bool)
    _, target = generalized_advantage(
        reward, value, torch.cat([value[1:], last]), never, never, gamma=0.97, gae_lambda=1.0
    )
    returns = last[0]
    for t in range(6, -1, -1):
        returns = reward[t] + 0.97 * returns
        torch.testing.assert_close(target[t], returns, rtol=0, atol=1e-12)


def test_bootstrap_rows_are_the_last_and_the_truncated_but_not_the_terminated() -> None:
    terminated = torch.tensor([[F, T], [F, T], [F, T]])
    truncated = torch.tensor([[T, T], [F, F], [F, F]])
    assert bootstrap_rows(terminated, truncated).tolist() == [[T, F], [F, F], [T, F]]


def test_n_step_stops_at_a_truncation() -> None:
    # Three-step target of the first transition: 1 + .9 * (1 + .9 * 10) = 10.0, nothing of the
    # episode that follows.
    target = n_step_target(
        column(1.0, 1.0, 5.0),
        column(7.0, 10.0, 3.0),
        column(F, F, F),
        column(F, T, F),
        gamma=0.9,
        n_steps=3,
    )
    torch.testing.assert_close(target[0], column(10.0)[0], rtol=0, atol=1e-12)


def test_n_step_of_one_and_of_the_end() -> None:
    reward, next_value = column(1.0, 2.0, 3.0), column(4.0, 5.0, 6.0)
    never = column(F, F, F)
    one = n_step_target(reward, next_value, never, never, gamma=0.5, n_steps=1)
    torch.testing.assert_close(one, column(3.0, 4.5, 6.0))
    two = n_step_target(reward, next_value, never, never, gamma=0.5, n_steps=2)
    torch.testing.assert_close(two, column(1 + 0.5 * 4.5, 2 + 0.5 * 6.0, 6.0))


def test_bad_shapes_and_steps_are_refused() -> None:
    good = torch.zeros(3, 2)
    ends = torch.zeros(3, 2, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"\(3,\)"):
        generalized_advantage(good[:, 0], good, good, ends, ends, gamma=0.9, gae_lambda=0.9)
    with pytest.raises(ValueError, match="n_steps is 0"):
        n_step_target(good, good, ends, ends, gamma=0.9, n_steps=0)
