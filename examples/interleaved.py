"""PPO that learns while its environments step, against PPO that waits for them.

    python examples/interleaved.py [TIMESTEPS]

The environment is CartPole with a simulator that takes 4 ms a step, in a process each. With
`update="interleaved"` an update runs in slices between `step_async` and `step_wait`; the policy
that acts is one update behind. The rollouts take as long as before, the updates little more.
"""

from __future__ import annotations

import sys
import tempfile
import time
from typing import Any

import gymnasium as gym
import torch

import koila_rl
from koila_rl.agents.interface import Progress


class Slow(gym.Wrapper[Any, Any, Any, Any]):
    """A simulator that takes its time."""

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """As of the environment, 4 ms later."""
        time.sleep(0.004)
        return super().step(action)


def make() -> gym.Env[Any, Any]:
    """CartPole, slowly."""
    return Slow(gym.make("CartPole-v1"))


def main(total_timesteps: int = 8_000) -> None:
    """Learn twice, print how long it took and what came of it."""
    torch.set_num_threads(1)
    for update in ("blocking", "interleaved"):
        states: list[Progress] = []
        with tempfile.TemporaryDirectory() as folder, koila_rl.limits(microbatch=64):
            began = time.perf_counter()
            result = koila_rl.train(
                make, "ppo", total_timesteps, n_envs=4, vectorization="async", run_dir=folder,
                progress=False, update=update, n_steps=64, batch_size=256, n_epochs=10,
                learning_rate=1e-3, net_arch=(256, 256),
                callbacks=[states.append],
            )  # fmt: skip
            seconds = time.perf_counter() - began
        shares = [state.metrics["time/hidden_update_share"] for state in states]
        last = result.returns[-20:] or (0.0,)
        print(
            f"{update}: {seconds:.0f} s, of its update time {sum(shares) / len(shares):.0%} beside "
            f"the environment; mean return of the last episodes {sum(last) / len(last):.0f}"
        )
    print(result.plan)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
