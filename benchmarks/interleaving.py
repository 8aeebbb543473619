"""What a loop costs whose updates run between the steps of its environments.

    python benchmarks/interleaving.py [--steps 64] [--rounds 4] [--cost sleeping computing]

PPO learns in a few rounds of a collected rollout and an update, with environments in processes of
their own. A step of the environments is made to cost what a microbatch costs, by sleeping (a
simulator elsewhere) or by computing (one here, in one process, since this benchmark is for
machines of two cores). Measured are

    environment   the rollouts alone: acting, stepping and storing
    update        the updates alone, blocking
    blocking      rollouts and updates in turn
    interleaved   both at once
    ratio         interleaved / max(environment, update): 1 is all that can be hidden
    beside        the updates alone, while an unrelated process computes: where this is more than
                  `update` the machine has no second core to give, and nothing can be hidden

each as seconds a round, the middle one of the rounds.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import statistics
import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import torch

import koila_rl
from koila_rl.agents.ppo import PPO

N_OBSERVATIONS = 64


class Costly(gym.Env[Any, Any]):
    """Observes noise; a step costs ``seconds``, asleep or of computing."""

    observation_space = gym.spaces.Box(-1.0, 1.0, (N_OBSERVATIONS,), np.float32)
    action_space = gym.spaces.Discrete(4)

    def __init__(self, cost: str, seconds: float) -> None:
        self._cost, self._seconds, self._count = cost, seconds, 0
        self._random = np.random.default_rng(0)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        return self._observe(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if self._cost == "sleeping":
            time.sleep(self._seconds)
        else:
            compute(self._seconds)
        self._count += 1
        return self._observe(), 1.0, False, self._count % 100 == 0, {}

    def _observe(self) -> Any:
        return self._random.standard_normal(N_OBSERVATIONS, dtype=np.float32)


def compute(seconds: float) -> None:
    """Use the processor for ``seconds`` of this process, whatever else runs."""
    until = time.process_time() + seconds
    while time.process_time() < until:
        pass


def make(cost: str, seconds: float, update: str, options: argparse.Namespace) -> PPO:
    """An agent whose update has one microbatch a step of the environments."""
    n_envs = 1 if cost == "computing" else 8
    samples = options.steps * n_envs
    return PPO(
        partial(Costly, cost, seconds),
        n_envs=n_envs,
        vectorization="async",
        update=update,
        n_steps=options.steps,
        batch_size=samples,
        n_epochs=options.steps * options.microbatch // samples,
        net_arch=(options.width, options.width),
        device="cpu",
    )


def collect(agent: PPO) -> koila_rl.RolloutBuffer:
    """One rollout: acting, stepping and storing."""
    assert agent.env is not None
    rollout = koila_rl.RolloutBuffer(agent.hyperparameters.n_steps, agent.env.n_envs, seed=0)
    agent.collect_rollout(agent.env, rollout)
    return rollout


def rounds(agent: PPO, count: int) -> tuple[float, float]:
    """Seconds of a round of `learn`, and the share of its update that was hidden."""
    assert agent.env is not None
    times, shares = [time.perf_counter()], []

    def note(state: Any) -> None:
        times.append(time.perf_counter())
        shares.append(state.metrics["time/hidden_update_share"])

    per_round = agent.hyperparameters.n_steps * agent.env.n_envs
    agent.learn(agent.num_timesteps + per_round * (count + 2), note)
    # The first and the last round have nothing beside them.
    passed = [after - before for before, after in itertools.pairwise(times[1:-1])]
    return statistics.median(passed), statistics.median(shares[1:-1])


def measure(cost: str, options: argparse.Namespace) -> None:
    """One line of the table."""
    made: list[PPO] = []
    try:
        first = make(cost, 0.0, "blocking", options)
        made.append(first)
        rollout = collect(first)
        first.evaluate_rollout(rollout)
        first.estimate_advantages(rollout)
        update = _median(lambda: first.update(rollout), options.rounds)
        seconds = update / options.steps
        other = multiprocessing.Process(target=compute, args=(1e6,), daemon=True)
        other.start()
        beside = _median(lambda: first.update(rollout), options.rounds)
        other.terminate()
        other.join()
        blocking, interleaved = (
            make(cost, seconds, kind, options) for kind in ("blocking", "interleaved")
        )
        made += [blocking, interleaved]
        environment = _median(lambda: collect(blocking), options.rounds)
        in_turn, _ = rounds(blocking, options.rounds)
        at_once, hidden = rounds(interleaved, options.rounds)
        ratio = at_once / max(environment, update)
        print(
            f"| {cost} | {options.steps} × {seconds * 1e3:.1f} ms | {environment:.3f} "
            f"| {update:.3f} | {in_turn:.3f} | {at_once:.3f} | {ratio:.2f} | {hidden:.0%} "
            f"| {beside:.3f} |",
            flush=True,
        )
    finally:
        for agent in made:
            assert agent.env is not None
            agent.env.close()


def _median(call: Callable[[], Any], rounds: int) -> float:
    """Seconds of the middle one of some calls, after one that is not counted."""
    taken = []
    for _ in range(rounds + 1):
        began = time.perf_counter()
        call()
        taken.append(time.perf_counter() - began)
    return statistics.median(taken[1:])


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cost", nargs="+", default=["sleeping", "computing"])
    parser.add_argument("--steps", type=int, default=64, help="of a rollout")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--width", type=int, default=1024, help="of two layers")
    parser.add_argument("--microbatch", type=int, default=32)
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    print(
        "| cost | a step | environment s | update s | blocking s | interleaved s | ratio | hidden |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for cost in options.cost:
        with koila_rl.limits(microbatch=options.microbatch):
            measure(cost, options)


if __name__ == "__main__":
    main()
