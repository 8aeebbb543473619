"""PPO of Stable-Baselines3; the one line more is marked.

python examples/integrations/sb3_ppo.py --total-timesteps 20000 --microbatch 500
"""

from __future__ import annotations

from dataclasses import dataclass

import tyro
from stable_baselines3 import PPO
from stable_baselines3.common.evaluation import evaluate_policy

import koila_rl


@dataclass
class Args:
    seed: int = 0
    env_id: str = "CartPole-v1"
    total_timesteps: int = 20_000
    n_steps: int = 2048
    batch_size: int = 2048
    lazy: bool = True
    memory: str = "auto"
    microbatch: int | None = None


def train(args: Args) -> PPO:
    model = PPO(
        "MlpPolicy", args.env_id, n_steps=args.n_steps, batch_size=args.batch_size,
        seed=args.seed, device="cpu",
    )  # fmt: skip
    if args.lazy:
        koila_rl.integrations.sb3.attach(model, args.memory, args.microbatch)  # the one line
    model.learn(args.total_timesteps)
    return model


def main(args: Args) -> None:
    model = train(args)
    mean, deviation = evaluate_policy(model, model.get_env(), n_eval_episodes=10)
    print(f"mean return {mean:.1f} ± {deviation:.1f}")
    print(koila_rl.last_plan())


if __name__ == "__main__":
    main(tyro.cli(Args))
