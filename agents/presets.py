"""Hyperparameters that are known to learn an environment, and where each set came from.

:func:`koila_rl.train` starts from these where it knows the environment; whatever the caller
names goes before them.
"""

from __future__ import annotations

from typing import Any

from koila_rl.agents.schedules import Linear

__all__ = ["PRESETS", "preset"]

PRESETS: dict[tuple[str, str], dict[str, Any]] = {
    # RL Baselines3 Zoo, hyperparams/ppo.yml.
    ("ppo", "CartPole-v1"): {
        "n_envs": 8,
        "n_steps": 32,
        "batch_size": 256,
        "n_epochs": 20,
        "gamma": 0.98,
        "gae_lambda": 0.8,
        "ent_coef": 0.0,
        "learning_rate": Linear(1e-3),
        "clip_range": Linear(0.2),
    },
    # RL Baselines3 Zoo, hyperparams/ppo.yml, without its state-dependent exploration (use_sde).
    ("ppo", "Pendulum-v1"): {
        "n_envs": 4,
        "n_steps": 1024,
        "n_epochs": 10,
        "gamma": 0.9,
        "gae_lambda": 0.95,
        "ent_coef": 0.0,
        "learning_rate": 1e-3,
        "clip_range": 0.2,
    },
    # RL Baselines3 Zoo, hyperparams/ppo.yml, LunarLander-v2.
    ("ppo", "LunarLander-v3"): {
        "n_envs": 16,
        "n_steps": 1024,
        "batch_size": 64,
        "n_epochs": 4,
        "gamma": 0.999,
        "gae_lambda": 0.98,
        "ent_coef": 0.01,
    },
}


def preset(agent: str, env: object) -> dict[str, Any]:
    """A copy of the preset for ``agent`` on the environment ``env``; empty where there is none."""
    return dict(PRESETS.get((agent, env), {})) if isinstance(env, str) else {}
