"""Learn LunarLander by DQN, then film it.

    pip install 'koila-rl[box2d]'
    python examples/dqn_lunarlander.py [TIMESTEPS]

The preset is double DQN with three-step returns; dueling networks and prioritised replay are a
switch each.
"""

from __future__ import annotations

import sys

import koila_rl
from koila_rl.callbacks import Evaluations


def main(total_timesteps: int = 200_000) -> None:
    """Train within 64 MiB an update, keep the best agent on the way, evaluate, film."""
    result = koila_rl.train(
        "LunarLander-v3",
        agent="dqn",
        total_timesteps=total_timesteps,
        memory="64MiB",
        callbacks=[Evaluations("LunarLander-v3", max(1, total_timesteps // 10), episodes=5)],
    )
    film = result.run_dir / "landing.gif"
    print(koila_rl.evaluate(result.agent, "LunarLander-v3", episodes=20, video=film))
    print(f"see {film}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
