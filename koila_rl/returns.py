"""Returns of rollouts, as functions of their inputs alone.

All take tensors of shape ``[n_steps, n_envs]``. Bootstrapping stops where an episode *terminated*
and goes on where it was only *truncated*: a time limit says nothing about the value of the state
that it cut off (Pardo et al. 2018, https://arxiv.org/abs/1712.00378).
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["bootstrap_rows", "generalized_advantage", "n_step_target"]


def generalized_advantage(
    reward: Tensor,
    value: Tensor,
    next_value: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    *,
    gamma: float,
    gae_lambda: float,
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimates and the value targets that go with them.

    Equation 16 of Schulman et al. 2016 (https://arxiv.org/abs/1506.02438), with
    ``delta = reward + gamma * next_value * (1 - terminated) - value``.

    Args:
        reward: Reward of each transition, ``[n_steps, n_envs]``.
        value: V of the state that each transition started from.
        next_value: V of the state that it led to; where the episode ended, of its final
            observation and not of the first one of the next episode.
        terminated: Whether the state it led to ended the episode, boolean.
        truncated: Whether the episode was cut off there, boolean.
        gamma: Discount.
        gae_lambda: 0 gives one-step TD errors, 1 gives returns minus values.

    Returns:
        ``advantage`` and ``value_target = advantage + value``, each ``[n_steps, n_envs]``.

    Raises:
        ValueError: The shapes differ.
    """
    _check_shapes(reward, value, next_value, terminated, truncated)
    delta = reward + gamma * next_value * (~terminated).to(reward.dtype) - value
    carry = gamma * gae_lambda * (~(terminated | truncated)).to(reward.dtype)
    advantage = torch.empty_like(delta)
    running = torch.zeros_like(delta[0])
    for t in range(len(delta) - 1, -1, -1):
        running = delta[t] + carry[t] * running
        advantage[t] = running
    return advantage, advantage + value


def bootstrap_rows(terminated: Tensor, truncated: Tensor) -> Tensor:
    """Where ``next_value[t]`` is not simply ``value[t + 1]`` and is needed, ``[n_steps, n_envs]``.

    These are the last step of the rollout and every truncated one: there the state that follows
    is not the one that the next row starts from. Terminated rows need no value at all.
    """
    rows = truncated.clone()
    rows[-1] = True
    return rows & ~terminated


def n_step_target(
    reward: Tensor,
    next_value: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    *,
    gamma: float,
    n_steps: int,
) -> Tensor:
    """Discounted sum of up to ``n_steps`` rewards plus the value of the state reached, ``[T, E]``.

    A sum ends early where the episode ends or the rollout does, and bootstraps from there unless
    the episode terminated. ``next_value`` is as in :func:`generalized_advantage`.

    Raises:
        ValueError: The shapes differ or ``n_steps`` is below 1.
    """
    if n_steps < 1:
        raise ValueError(f"n_steps is {n_steps} but must be at least 1")
    _check_shapes(reward, next_value, terminated, truncated)
    ended = terminated | truncated
    target = reward + gamma * next_value * (~terminated).to(reward.dtype)
    for _ in range(n_steps - 1):
        longer = reward[:-1] + gamma * target[1:]
        target = torch.cat([torch.where(ended[:-1], target[:-1], longer), target[-1:]])
    return target


def _check_shapes(*tensors: Tensor) -> None:
    shapes = [tuple(tensor.shape) for tensor in tensors]
    if len(set(shapes)) != 1 or len(shapes[0]) != 2:
        raise ValueError(f"expected equal shapes [n_steps, n_envs] but got {shapes}")
