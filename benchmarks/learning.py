"""Whether the agents learn what they should: presets, seeds fixed beforehand, fresh episodes.

    python benchmarks/learning.py [ROW ...] [--seeds 0 1 2]    run what is not in the results yet
    python benchmarks/learning.py --list                       the rows and their names
    python benchmarks/learning.py --table                      print and write the table only

Each run is a process of its own, started one after another. It trains with `koila_rl.train` and
the preset of the environment, plays 50 episodes with seeds that training did not use, and is
appended to `learning/results.csv`, however it ends. `learning/table.md` and a learning curve a
row are drawn from what is there. A row passes if enough of its seeds reach the threshold.
"""

from __future__ import annotations

import argparse
import csv
import os
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "learning"
RESULTS = FOLDER / "results.csv"
RUNS = Path("runs") / "learning"
EPISODES, EVALUATION_SEED, SELECTION_SEED = 50, 10_000, 20_000
COLUMNS = (
    "row", "seed", "timesteps", "score", "std", "threshold", "train_seconds", "checkpoint",
    "date", "commit", "torch", "machine", "failure",
)  # fmt: skip


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    name: str
    agent: str
    env: str
    total_timesteps: int
    threshold: float
    published: str
    """The published figure of the same algorithm, and where it is from."""
    seeds: tuple[int, ...] = (0, 1, 2)
    needed: int = 3
    """Seeds that must reach the threshold."""
    best: bool = False
    """Score the best checkpoint, chosen on other episodes, instead of the final policy."""
    settings: dict[str, Any] = field(default_factory=dict)


ROWS = {
    row.name: row
    for row in (
        Row("ppo-cartpole", "ppo", "CartPole-v1", 100_000, 475, "500"),
        Row(
            "ppo-cartpole-interleaved", "ppo", "CartPole-v1", 100_000, 475, "500",
            settings={"update": "interleaved"},
        ),
        Row("ppo-acrobot", "ppo", "Acrobot-v1", 500_000, -90, "-86.4"),
        Row("ppo-pendulum", "ppo", "Pendulum-v1", 200_000, -250, "-172"),
        Row("ppo-lunarlander", "ppo", "LunarLander-v3", 1_000_000, 200, "242 (v2)"),
        Row("recurrent-cartpole", "recurrent_ppo", "CartPoleNoVel-v1", 100_000, 450, "500"),
        Row(
            "dqn-cartpole", "dqn", "CartPole-v1", 50_000, 475, "500",
            seeds=(0, 1, 2, 3, 4), needed=4, best=True,
        ),
        Row(
            "dqn-cartpole-interleaved", "dqn", "CartPole-v1", 50_000, 475, "500",
            best=True, settings={"update": "interleaved"},
        ),
        Row("dqn-lunarlander", "dqn", "LunarLander-v3", 200_000, 150, "–"),
        Row("dqn-mountaincar", "dqn", "MountainCar-v0", 150_000, -130, "-101"),
    )
}  # fmt: skip


def register_without_velocities() -> None:
    """CartPoleNoVel-v1: position and angle alone, named as in RL Baselines3 Zoo."""
    import gymnasium as gym
    import numpy as np
    from gymnasium.wrappers import TransformObservation

    def make(**kwargs: Any) -> gym.Env[Any, Any]:
        env = gym.make("CartPole-v1", **kwargs)
        space = env.observation_space
        assert isinstance(space, gym.spaces.Box)
        seen = gym.spaces.Box(space.low[[0, 2]], space.high[[0, 2]], dtype=np.float32)
        return TransformObservation(env, lambda observation: observation[[0, 2]], seen)

    gym.register("CartPoleNoVel-v1", make)


def run(row: Row, seed: int) -> None:
    """Train, score and append one line to the results; runs in a process of its own."""
    import torch

    import koila_rl
    from koila_rl.callbacks import Evaluations

    register_without_velocities()
    run_dir = RUNS / f"{row.name}_seed{seed}_{time.strftime('%Y%m%d-%H%M%S')}"
    result: dict[str, Any] = {
        "row": row.name,
        "seed": seed,
        "threshold": row.threshold,
        "checkpoint": "best" if row.best else "final",
        "date": time.strftime("%Y-%m-%d"),
        "commit": _commit(),
        "torch": torch.__version__,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {torch.get_num_threads()} used",
    }
    choose = Evaluations(
        row.env, every=2_000, episodes=20, seed=SELECTION_SEED, best=run_dir / "best.pt"
    )
    start = time.perf_counter()
    try:
        trained = koila_rl.train(
            row.env,
            row.agent,
            row.total_timesteps,
            seed=seed,
            run_dir=run_dir,
            progress=False,
            callbacks=[choose] if row.best else [],
            **row.settings,
        )
        result["train_seconds"] = round(time.perf_counter() - start)
        agent = koila_rl.load(run_dir / "best.pt") if row.best else trained.agent
        played = koila_rl.evaluate(agent, row.env, EPISODES, EVALUATION_SEED)
        result |= {
            "timesteps": trained.agent.num_timesteps,
            "score": round(played.mean, 2),
            "std": round(played.std, 2),
        }
        (FOLDER / "curves").mkdir(exist_ok=True)
        _save_curve(run_dir, FOLDER / "curves" / f"{row.name}_seed{seed}.csv")
    except Exception as error:
        result["failure"] = f"{type(error).__name__}: {error}".splitlines()[0]
        raise
    finally:
        _append(result)


def _save_curve(run_dir: Path, path: Path, points: int = 200) -> None:
    """Mean return of the last 100 episodes at up to ``points`` time steps."""
    from koila_rl.metrics import read_episodes

    episodes = read_episodes(run_dir)
    returns = [value for _, value in episodes]
    stride = max(1, len(episodes) // points)
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["timesteps", "mean_return"])
        for i in range(stride - 1, len(episodes), stride):
            recent = returns[max(0, i - 99) : i + 1]
            writer.writerow([episodes[i][0], round(sum(recent) / len(recent), 2)])


def _append(result: dict[str, Any]) -> None:
    fresh = not RESULTS.exists()
    with RESULTS.open("a", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        if fresh:
            writer.writeheader()
        writer.writerow(result)


def _commit() -> str:
    done = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=FOLDER
    )
    return done.stdout.strip() or "unknown"


def read_results() -> list[dict[str, str]]:
    """The runs so far, oldest first."""
    if not RESULTS.exists():
        return []
    with RESULTS.open(newline="") as file:
        return list(csv.DictReader(file))


def table() -> str:
    """The table in Markdown; of runs of the same row and seed the newest counts."""
    newest = {(run["row"], int(run["seed"])): run for run in read_results()}
    lines = [
        "| row | environment | steps | threshold | published | scores by seed | passed "
        "| seconds a run |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in ROWS.values():
        runs = [newest.get((row.name, seed)) for seed in row.seeds]
        scores = [_score(run) for run in runs]
        reached = [
            run is not None and run["score"] != "" and float(run["score"]) >= row.threshold
            for run in runs
        ]
        verdict = f"{sum(reached)} of {len(row.seeds)}"
        if None in runs:
            verdict += ", unfinished"
        else:
            verdict += ": passes" if sum(reached) >= row.needed else ": FAILS"
        seconds = [int(run["train_seconds"]) for run in runs if run and run["train_seconds"]]
        mean = f"{sum(seconds) / len(seconds):.0f}" if seconds else "–"
        lines.append(
            f"| {row.name} | {row.env} | {row.total_timesteps:,} | ≥ {row.threshold:g} on "
            f"{row.needed} of {len(row.seeds)} | {row.published} | {', '.join(scores)} | {verdict} "
            f"| {mean} |"
        )
    return "\n".join(lines)


def _score(run: dict[str, str] | None) -> str:
    if run is None:
        return "–"
    return run["score"] or f"failed ({run['failure']})"


def draw(row: Row) -> None:
    """A PNG with one line a seed."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.0, 3.5), layout="constrained")
    axes = figure.add_subplot()
    for seed in row.seeds:
        path = FOLDER / "curves" / f"{row.name}_seed{seed}.csv"
        if path.exists():
            with path.open(newline="") as file:
                points = [(int(a), float(b)) for a, b in list(csv.reader(file))[1:]]
            axes.plot(*zip(*points, strict=True), label=f"seed {seed}")
    if axes.lines:
        axes.axhline(row.threshold, linestyle="--", color="gray", label="threshold")
        axes.set(title=row.name, xlabel="environment steps", ylabel="mean of 100 returns")
        axes.legend(loc="best")
        axes.grid(alpha=0.3)
        figure.savefig(FOLDER / f"{row.name}.png", dpi=90)


def report() -> None:
    """Write the table and the curves, and print the table."""
    text = table()
    machines = sorted({run["machine"] for run in read_results()})
    (FOLDER / "table.md").write_text(
        "# Learning benchmarks\n\n`python benchmarks/learning.py`; scores are mean returns of "
        f"{EPISODES} fresh episodes, deterministic policy, and – is a run that was not made. "
        "Published figures are those of RL Baselines3 Zoo's benchmark.\n\n"
        f"{text}\n\nMachine: {'; '.join(machines)}; seconds are of the clock, whatever else ran. "
        "Every run, repeated ones too, is in `results.csv` with its date and commit; curves are "
        "means of the last 100 training episodes. The presets of dqn-lunarlander, dqn-mountaincar "
        "and recurrent-cartpole were changed after their first runs had failed, on seeds 10 to 14, "
        "which score nothing.\n"
    )
    for row in ROWS.values():
        draw(row)
    print(text)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run what is missing, then report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rows", nargs="*", metavar="ROW", help="names of rows; all if none")
    parser.add_argument("--seeds", type=int, nargs="+", help="these only")
    parser.add_argument("--again", action="store_true", help="run also what has a result")
    parser.add_argument("--list", action="store_true", help="print the rows")
    parser.add_argument("--table", action="store_true", help="print and write the table only")
    parser.add_argument("--one", nargs=2, metavar=("ROW", "SEED"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.one:
        run(ROWS[options.one[0]], int(options.one[1]))
        return
    if options.list:
        for row in ROWS.values():
            print(f"{row.name}: {row.agent} on {row.env}, seeds {row.seeds}")
        return
    unknown = [name for name in options.rows if name not in ROWS]
    if unknown:
        parser.error(f"unknown rows {unknown}; known: {', '.join(ROWS)}")
    FOLDER.mkdir(exist_ok=True)
    began = time.perf_counter()
    done = {(run["row"], int(run["seed"])) for run in read_results() if not run["failure"]}
    for name in () if options.table else options.rows or ROWS:
        for seed in options.seeds or ROWS[name].seeds:
            if options.again or (name, seed) not in done:
                subprocess.run([sys.executable, __file__, "--one", name, str(seed)], check=False)
    report()
    print(f"\n{(time.perf_counter() - began) / 60:.0f} minutes")


if __name__ == "__main__":
    main()
