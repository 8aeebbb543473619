"""Learn CartPole within 64 MiB an update, then play it.

    python examples/ppo_cartpole.py [TIMESTEPS]

100,000 time steps (the default) reach a mean return of 500 of 500.
"""

from __future__ import annotations

import sys

import koila_rl


def main(total_timesteps: int = 100_000) -> None:
    """Train, say what ran, evaluate."""
    result = koila_rl.train("CartPole-v1", total_timesteps=total_timesteps, memory="64MiB")
    print(result.plan)
    print(koila_rl.evaluate(result.agent, "CartPole-v1", episodes=20))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
