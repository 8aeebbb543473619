"""What attaching costs Stable-Baselines3 where everything fits: `learn()` attached over plain.

    python benchmarks/integrations.py

Both models live in one process and learn in turn, so that a change of the machine's speed meets
both; printed is the median ratio of processor time over the rounds, of `learn()` and of the
updates alone, with the range. Neither model is split.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from stable_baselines3 import DQN, PPO
from stable_baselines3.common.env_util import make_vec_env

from koila_rl.integrations import sb3

ROUNDS = 9


class Images(gym.Env[Any, Any]):
    """Four stacked frames of 84 × 84, drawn once; episodes of a hundred steps."""

    observation_space = gym.spaces.Box(0, 255, (4, 84, 84), np.uint8)
    action_space = gym.spaces.Discrete(4)

    def __init__(self) -> None:
        generator = np.random.default_rng(0)
        self.frames = generator.integers(0, 256, (16, 4, 84, 84), dtype=np.uint8)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.count = 0
        return self.frames[0], {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.count += 1
        return self.frames[self.count % 16], float(action == 0), self.count >= 100, False, {}


def mlp() -> Any:
    return PPO("MlpPolicy", make_vec_env("CartPole-v1", 4, seed=0), n_steps=512, seed=0)


def cnn() -> Any:
    env = make_vec_env(Images, 4, seed=0)
    return PPO("CnnPolicy", env, n_steps=64, n_epochs=4, seed=0, device="cpu")


def dqn() -> Any:
    return DQN("MlpPolicy", "CartPole-v1", learning_starts=100, seed=0, device="cpu")


def timed(model: Any, steps: int) -> tuple[float, float]:
    """Processor seconds of `learn()`, and of the updates in it."""
    train, updates = model.train, 0.0

    def measured(*args: Any, **kwargs: Any) -> None:
        nonlocal updates
        begin = time.process_time()
        train(*args, **kwargs)
        updates += time.process_time() - begin

    model.train = measured
    begin = time.process_time()
    try:
        model.learn(steps, reset_num_timesteps=False)
    finally:
        del model.train
    return time.process_time() - begin, updates


def compare(name: str, make: Any, steps: int) -> None:
    plain, attached = make(), sb3.attach(make())
    for model in (plain, attached):
        timed(model, steps)
    ratios: list[tuple[float, float]] = []
    seconds = []
    for number in range(ROUNDS):
        order = (plain, attached) if number % 2 else (attached, plain)
        found = {id(model): timed(model, steps) for model in order}
        theirs, ours = found[id(plain)], found[id(attached)]
        ratios.append((ours[0] / theirs[0], ours[1] / theirs[1]))
        seconds.append(theirs[0])
    for label, values in zip(("learn", "updates"), zip(*ratios, strict=True), strict=True):
        middle = statistics.median(values)
        print(f"{name:16} {label:8} {middle:5.2f}  ({min(values):.2f} to {max(values):.2f})")
    print(f"{name:16} plain learn() of {steps} steps: {statistics.median(seconds):.2f} s")


def main() -> None:
    torch.set_num_threads(1)
    compare("PPO MlpPolicy", mlp, 2048)
    compare("PPO CnnPolicy", cnn, 256)
    compare("DQN MlpPolicy", dqn, 2000)


if __name__ == "__main__":
    main()
