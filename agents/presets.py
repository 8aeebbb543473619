"""Hyperparameters that are known to learn an environment, and where each set came from.

:func:`koila_rl.train` starts from these where it knows the environment; whatever the caller
names goes before them.
"""

from __future__ import annotations

import copy
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
    # RL Baselines3 Zoo, hyperparams/ppo.yml.
    ("ppo", "Acrobot-v1"): {
        "n_envs": 16,
        "n_steps": 256,
        "n_epochs": 4,
        "gamma": 0.99,
        "gae_lambda": 0.94,
        "ent_coef": 0.0,
        "normalize_observation": True,
        "normalize_reward": True,
    },
    # Begun from RL Baselines3 Zoo, hyperparams/ppo_lstm.yml, with a memory of 64 in place of 256.
    # Rollouts four times as long, λ of 0.95, half the epochs and half the learning rate, and above
    # all normalised rewards: without, seeds differ by hundreds, as value targets of 50 drown the
    # policy's gradient in the norm that both share, and what was learned is lost again.
    ("recurrent_ppo", "CartPoleNoVel-v1"): {
        "n_envs": 8,
        "n_steps": 128,
        "sequence_length": 32,
        "batch_size": 256,
        "n_epochs": 10,
        "gamma": 0.98,
        "gae_lambda": 0.95,
        "ent_coef": 0.0,
        "learning_rate": Linear(5e-4),
        "clip_range": Linear(0.2),
        "hidden_size": 64,
        "normalize_observation": True,
        "normalize_reward": True,
    },
    # RL Baselines3 Zoo, hyperparams/dqn.yml, as of 2021 (benchmark of version 1.0).
    ("dqn", "CartPole-v1"): {
        "learning_rate": 2.3e-3,
        "batch_size": 64,
        "buffer_size": 100_000,
        "learning_starts": 1_000,
        "gamma": 0.99,
        "target_update_interval": 10,
        "train_freq": 256,
        "gradient_steps": 128,
        "exploration_fraction": 0.16,
        "exploration_final_eps": 0.04,
        "net_arch": (256, 256),
    },
    # As above, LunarLander-v2, but for double Q-learning, three-step returns, a learning rate that
    # falls, a buffer that keeps everything and half the last ε: without them the last policy of
    # 200,000 steps is as good as the moment, often one that hovers.
    ("dqn", "LunarLander-v3"): {
        "double": True,
        "n_steps": 3,
        "learning_rate": Linear(6.3e-4),
        "batch_size": 128,
        "buffer_size": 200_000,
        "learning_starts": 0,
        "gamma": 0.99,
        "target_update_interval": 250,
        "train_freq": 4,
        "gradient_steps": -1,
        "exploration_fraction": 0.12,
        "exploration_final_eps": 0.05,
        "net_arch": (256, 256),
    },
    # As above, but for a learning rate that falls and a buffer five times as large: with the
    # last 10,000 transitions alone, Q forgets near the end what a policy that succeeds never sees.
    ("dqn", "MountainCar-v0"): {
        "learning_rate": Linear(4e-3),
        "batch_size": 128,
        "buffer_size": 50_000,
        "learning_starts": 1_000,
        "gamma": 0.98,
        "target_update_interval": 600,
        "train_freq": 16,
        "gradient_steps": 8,
        "exploration_fraction": 0.2,
        "exploration_final_eps": 0.07,
        "net_arch": (256, 256),
    },
    # RL Baselines3 Zoo, hyperparams/dqn.yml, atari, with a buffer of a tenth.
    ("dqn", "ALE/*"): {
        "env_kwargs": {"frameskip": 4, "stack_num": 4, "grayscale": True, "reward_clipping": True},
        "learning_rate": 1e-4,
        "batch_size": 32,
        "buffer_size": 100_000,
        "learning_starts": 100_000,
        "target_update_interval": 10_000,
        "train_freq": 4,
        "gradient_steps": 1,
        "exploration_fraction": 0.1,
        "exploration_final_eps": 0.1,
        "frame_stack": 4,
    },
    # RL Baselines3 Zoo, hyperparams/ppo.yml, atari.
    ("ppo", "ALE/*"): {
        "n_envs": 8,
        "env_kwargs": {"frameskip": 4, "stack_num": 4, "grayscale": True, "reward_clipping": True},
        "n_steps": 128,
        "n_epochs": 4,
        "batch_size": 256,
        "learning_rate": Linear(2.5e-4),
        "clip_range": Linear(0.1),
        "vf_coef": 0.5,
        "ent_coef": 0.01,
    },
}


def preset(agent: str, env: object) -> dict[str, Any]:
    """A copy of the preset for ``agent`` on the environment ``env``; empty where there is none.

    What is named exactly goes before a family, written ``"ALE/*"``.
    """
    if not isinstance(env, str):
        return {}
    family = f"{env.partition('/')[0]}/*"
    return copy.deepcopy(PRESETS.get((agent, env)) or PRESETS.get((agent, family)) or {})
