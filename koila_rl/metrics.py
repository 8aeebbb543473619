"""What a run leaves behind: metrics as CSV and TensorBoard, episodes, a learning curve."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from koila_rl.checkpoint import write_atomically
from koila_rl.envs import Episode

if TYPE_CHECKING:
    from torch.utils.tensorboard.writer import SummaryWriter

__all__ = ["RunLog", "draw_learning_curve", "read_episodes"]

_STEP = "num_timesteps"


class RunLog:
    """Appends to ``metrics.csv``, ``episodes.csv`` and ``tensorboard/`` of a run's folder.

    A folder that holds some already is continued.
    """

    def __init__(self, run_dir: Path) -> None:
        # Imported here, since TensorBoard takes longer to import than all of koila_rl.
        from torch.utils.tensorboard.writer import SummaryWriter

        self._metrics = run_dir / "metrics.csv"
        self._episodes = run_dir / "episodes.csv"
        self._names = _header(self._metrics)
        self._writer: SummaryWriter = SummaryWriter(str(run_dir / "tensorboard"))
        if not self._episodes.exists():
            self._episodes.write_text(f"{_STEP},return,length\n")

    def add(
        self, num_timesteps: int, metrics: dict[str, float], episodes: Sequence[Episode] = ()
    ) -> None:
        """One row of metrics at ``num_timesteps``, and the episodes that ended up to it."""
        unknown = [name for name in metrics if name not in self._names]
        if unknown:
            self._widen([*(self._names or [_STEP]), *unknown])
        row = {_STEP: num_timesteps, **metrics}
        with self._metrics.open("a", newline="") as file:
            csv.DictWriter(file, self._names).writerow(row)
        self.add_episodes(num_timesteps, episodes)
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, num_timesteps)

    def add_episodes(self, num_timesteps: int, episodes: Sequence[Episode]) -> None:
        """Episodes that ended up to ``num_timesteps``, without metrics."""
        with self._episodes.open("a", newline="") as file:
            csv.writer(file).writerows(
                (num_timesteps, episode.total_reward, episode.length) for episode in episodes
            )

    def close(self) -> None:
        """Flush TensorBoard's events."""
        self._writer.close()

    def _widen(self, names: list[str]) -> None:
        """Rewrite the table under more columns; a metric may first appear late."""
        rows = []
        if self._metrics.exists():
            with self._metrics.open(newline="") as file:
                rows = list(csv.DictReader(file))
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, names)
        writer.writeheader()
        writer.writerows(rows)
        write_atomically(self._metrics, text.getvalue().encode())
        self._names = names


def read_episodes(run_dir: Path) -> list[tuple[int, float]]:
    """Time step and return of each episode of a run, oldest first."""
    with (run_dir / "episodes.csv").open(newline="") as file:
        return [(int(row[_STEP]), float(row["return"])) for row in csv.DictReader(file)]


def draw_learning_curve(
    path: Path, episodes: Sequence[tuple[int, float]], title: str, window: int = 100
) -> None:
    """A PNG of the return of each episode and of the mean over the last ``window``."""
    # A figure of its own: pyplot would choose a window system and keep global state.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.0, 4.0), layout="constrained")
    axes = figure.add_subplot()
    steps = [step for step, _ in episodes]
    returns = [value for _, value in episodes]
    means = [
        sum(returns[max(0, i + 1 - window) : i + 1]) / min(i + 1, window)
        for i in range(len(returns))
    ]
    axes.plot(steps, returns, ".", markersize=2, alpha=0.35, label="episode")
    axes.plot(steps, means, linewidth=2, label=f"mean of the last {window}")
    axes.set(title=title, xlabel="environment steps", ylabel="return")
    axes.legend(loc="best")
    axes.grid(alpha=0.3)
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=150)
    write_atomically(path, content.getvalue())


def _header(path: Path) -> list[str]:
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return next(csv.reader(file), [])
