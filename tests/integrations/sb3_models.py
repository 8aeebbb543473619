"""Tiny models of Stable-Baselines3, one maker for all algorithms and policies."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import torch
from sb3_contrib import QRDQN, TQC, RecurrentPPO
from stable_baselines3 import A2C, DDPG, DQN, PPO, SAC, TD3
from stable_baselines3.common.env_util import make_vec_env
from torch import Tensor

ON_POLICY = (PPO, A2C, RecurrentPPO)
OFF_POLICY = (DQN, SAC, TD3, DDPG, QRDQN, TQC)
DISCRETE = (PPO, A2C, RecurrentPPO, DQN, QRDQN)

IMAGE = gym.spaces.Box(0, 255, (1, 36, 36), np.uint8)
VECTOR = gym.spaces.Box(-1.0, 1.0, (3,), np.float32)
SPACES = {
    "MlpPolicy": VECTOR,
    "CnnPolicy": IMAGE,
    "MultiInputPolicy": gym.spaces.Dict({"image": IMAGE, "vector": VECTOR}),
}


class Noise(gym.Env[Any, Any]):
    """Observations and rewards drawn from the seed; episodes of seven steps."""

    def __init__(self, observations: gym.Space[Any], discrete: bool = True) -> None:
        self.observation_space = observations
        self.action_space = (
            gym.spaces.Discrete(2) if discrete else gym.spaces.Box(-1.0, 1.0, (2,), np.float32)
        )

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        if seed is not None:
            self.observation_space.seed(seed)
        self.count = 0
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.count += 1
        reward = float(np.sum(action)) + float(self.np_random.normal())
        return self.observation_space.sample(), reward, self.count == 7, False, {}


def model(
    algorithm: Any, policy: str = "MlpPolicy", *, width: int = 8, n_envs: int = 1, **settings: Any
) -> Any:
    """A model whose ``learn(updates(algorithm))`` makes three updates or a few more."""
    extractor = {
        "MlpPolicy": {}, "CnnPolicy": {"features_dim": width},
        "MultiInputPolicy": {"cnn_output_dim": width},
    }[policy]  # fmt: skip
    networks: dict[str, Any] = {"net_arch": [width, width], "features_extractor_kwargs": extractor}
    if algorithm in (PPO, RecurrentPPO):
        common: dict[str, Any] = {"n_steps": 24, "batch_size": 8, "n_epochs": 1}
    elif algorithm is A2C:
        common = {"n_steps": 8}
    else:
        common = {"buffer_size": 100, "learning_starts": 8, "train_freq": 4, "batch_size": 8}
    if algorithm in (DQN, QRDQN):
        common["target_update_interval"] = 4
    if algorithm is RecurrentPPO:
        networks["lstm_hidden_size"] = width
        policy = policy.replace("Policy", "LstmPolicy")
    space = SPACES[policy.replace("LstmPolicy", "Policy")]
    env = make_vec_env(
        Noise, n_envs, seed=0,
        env_kwargs={"observations": space, "discrete": algorithm in DISCRETE},
    )  # fmt: skip
    settings = {**common, "seed": 0, "device": "cpu", "policy_kwargs": networks, **settings}
    return algorithm(policy, env, **settings)


def steps(algorithm: Any) -> int:
    """Steps of ``learn()`` for three updates."""
    return 20 if algorithm in OFF_POLICY else 24


def parameters(model: Any) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.policy.parameters()])
