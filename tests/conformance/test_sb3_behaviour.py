"""What Stable-Baselines3's own tests ask of its algorithms, held with the line against without.

A selection like theirs: run with every option, identity environments, dictionaries, images,
n-step returns, hindsight, normalised environments, several environments, state-dependent noise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from sb3_contrib import QRDQN, TQC, RecurrentPPO
from stable_baselines3 import A2C, DDPG, DQN, PPO, SAC, TD3, HerReplayBuffer
from stable_baselines3.common.buffers import NStepReplayBuffer
from stable_baselines3.common.envs import BitFlippingEnv, IdentityEnv, IdentityEnvBox
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.noise import NormalActionNoise
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize

from koila_rl.integrations import sb3
from tests.helpers import allow_unsplit
from tests.integrations.sb3_models import VECTOR, Noise, model, parameters, steps

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.filterwarnings("ignore"),  # theirs: minibatch sizes, learning starts, and so on
]


def normalised(algorithm: Any, **settings: Any) -> Any:
    made = model(algorithm, **settings)
    made.set_env(VecNormalize(made.get_env()))
    return made


def flipping(algorithm: Any) -> Any:
    env = BitFlippingEnv(n_bits=4, continuous=algorithm not in (DQN, QRDQN))
    return algorithm(
        "MultiInputPolicy", env, replay_buffer_class=HerReplayBuffer, seed=0, device="cpu",
        replay_buffer_kwargs={"n_sampled_goal": 2, "goal_selection_strategy": "future"},
        learning_starts=8, batch_size=8, buffer_size=100, policy_kwargs={"net_arch": [8]},
        train_freq=4, gradient_steps=1,
    )  # fmt: skip


CASES: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "ppo clipped values": (PPO, lambda a: model(a, clip_range_vf=0.2)),
    "ppo advantages as they are": (PPO, lambda a: model(a, normalize_advantage=False)),
    "ppo early stop": (PPO, lambda a: model(a, n_epochs=4, target_kl=1e-4)),
    "ppo entropy": (PPO, lambda a: model(a, ent_coef=0.01)),
    "ppo odd minibatches": (PPO, lambda a: model(a, batch_size=7)),
    "ppo several environments": (PPO, lambda a: model(a, n_envs=3, n_steps=8)),
    "ppo continuous": (PPO, lambda a: continuous(a)),
    "ppo state-dependent noise": (PPO, lambda a: continuous(a, use_sde=True)),
    "a2c Adam": (A2C, lambda a: model(a, use_rms_prop=False)),
    "a2c normalised advantages": (A2C, lambda a: model(a, normalize_advantage=True)),
    "a2c state-dependent noise": (A2C, lambda a: continuous(a, use_sde=True)),
    "a2c normalised environment": (A2C, normalised),
    "dqn several environments": (DQN, lambda a: model(a, n_envs=2)),
    "dqn shared observations": (
        DQN, lambda a: model(
            a, optimize_memory_usage=True,
            replay_buffer_kwargs={"handle_timeout_termination": False},
        ),
    ),
    "dqn n-step": (
        DQN, lambda a: model(
            a, replay_buffer_class=NStepReplayBuffer,
            replay_buffer_kwargs={"n_steps": 3, "gamma": 0.9},
        ),
    ),
    "dqn hindsight": (DQN, flipping),
    "dqn normalised environment": (DQN, normalised),
    "dqn many gradient steps": (DQN, lambda a: model(a, gradient_steps=3)),
    "sac fixed temperature": (SAC, lambda a: model(a, ent_coef=0.1)),
    "sac state-dependent noise": (SAC, lambda a: model(a, use_sde=True)),
    "sac one critic": (SAC, lambda a: critics(a, 1)),
    "sac hindsight": (SAC, flipping),
    "sac n-step": (
        SAC, lambda a: model(
            a, replay_buffer_class=NStepReplayBuffer,
            replay_buffer_kwargs={"n_steps": 2, "gamma": 0.9},
        ),
    ),
    "td3 action noise": (
        TD3, lambda a: model(a, action_noise=NormalActionNoise(np.zeros(2), 0.1 * np.ones(2))),
    ),
    "td3 three critics": (TD3, lambda a: critics(a, 3)),
    "td3 normalised environment": (TD3, normalised),
    "ddpg hindsight": (DDPG, flipping),
    "qrdqn quantiles": (
        QRDQN, lambda a: model(a, policy_kwargs={"n_quantiles": 5, "net_arch": [8]}),
    ),
    "tqc dropped atoms": (TQC, lambda a: model(a, top_quantiles_to_drop_per_net=1)),
    "recurrent ppo several environments": (
        RecurrentPPO, lambda a: model(a, n_envs=3, n_steps=8, batch_size=24),
    ),
    "recurrent ppo early stop": (RecurrentPPO, lambda a: model(a, n_epochs=3, target_kl=1e-4)),
}  # fmt: skip


def continuous(algorithm: Any, **settings: Any) -> Any:
    env = DummyVecEnv([lambda: Noise(VECTOR, discrete=False)])
    sizes = {"n_steps": 24, "batch_size": 8, "n_epochs": 2} if algorithm is PPO else {"n_steps": 8}
    return algorithm(
        "MlpPolicy", env, seed=0, device="cpu", policy_kwargs={"net_arch": [8]}, **sizes, **settings
    )


def critics(algorithm: Any, number: int) -> Any:
    return model(algorithm, policy_kwargs={"n_critics": number, "net_arch": [8]})


@pytest.mark.parametrize("microbatch", [None, 3], ids=["whole", "split"])
@pytest.mark.parametrize("case", list(CASES))
def test_learn_is_the_same_with_the_line(case: str, microbatch: int | None) -> None:
    algorithm, make = CASES[case]

    def learned(attach: bool) -> torch.Tensor:
        made = make(algorithm)
        if attach:
            sb3.attach(made, microbatch=microbatch)
        with allow_unsplit():
            made.learn(2 * steps(algorithm))
        return parameters(made)

    torch.testing.assert_close(learned(attach=True), learned(attach=False), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("algorithm", "env", "settings"),
    [
        (PPO, IdentityEnv(2), {"n_steps": 128, "batch_size": 128, "learning_rate": 3e-3}),
        (A2C, IdentityEnv(2), {"learning_rate": 1e-2}),
        (DQN, IdentityEnv(2), {"learning_rate": 5e-3, "exploration_fraction": 0.3,
                               "learning_starts": 32, "batch_size": 32, "train_freq": 2}),
        (SAC, IdentityEnvBox(eps=0.5), {"learning_rate": 3e-3, "learning_starts": 100,
                                        "train_freq": 2}),
        (TD3, IdentityEnvBox(eps=0.5), {"learning_rate": 3e-3, "learning_starts": 100,
                                        "train_freq": 2}),
    ],
    ids=["ppo", "a2c", "dqn", "sac", "td3"],
)  # fmt: skip
def test_identity_is_learned_split(algorithm: Any, env: gym.Env[Any, Any], settings: Any) -> None:
    made = algorithm(
        "MlpPolicy", env, seed=0, device="cpu", gamma=0.4, policy_kwargs={"net_arch": [32]},
        **settings,
    )  # fmt: skip
    sb3.attach(made, microbatch=20).learn(1000)
    mean, _ = evaluate_policy(made, made.get_env(), n_eval_episodes=10, warn=False)
    assert mean > 85
