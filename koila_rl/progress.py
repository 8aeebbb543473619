"""What a person sees while an agent learns: one line that moves, and a table at the end."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from koila_rl.envs import Episode

__all__ = ["Display"]


class Display:
    """A progress bar with recent returns, steps a second and the memory plan."""

    def __init__(self, title: str, total_timesteps: int, start: int, enabled: bool) -> None:
        self._console = Console()
        self._start, self._began = start, time.monotonic()
        self._recent: deque[float] = deque(maxlen=100)
        self._count = 0
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[status]}"),
            TimeRemainingColumn(),
            console=self._console,
            disable=not enabled,
        )
        self._enabled = enabled
        self._task = self._bar.add_task(title, total=total_timesteps, completed=start, status="")

    @property
    def mean_return(self) -> float | None:
        """Mean of the last 100 returns; None before the first."""
        return sum(self._recent) / len(self._recent) if self._recent else None

    def steps_per_second(self, num_timesteps: int) -> float:
        """Environment steps a second since learning began, updates included."""
        return (num_timesteps - self._start) / max(time.monotonic() - self._began, 1e-9)

    def update(self, num_timesteps: int, episodes: tuple[Episode, ...], plan: object) -> None:
        """Show where learning stands."""
        self._recent.extend(episode.total_reward for episode in episodes)
        self._count += len(episodes)
        mean = self.mean_return
        parts = [f"{self.steps_per_second(num_timesteps):,.0f} steps/s"]
        if mean is not None:
            parts.insert(0, f"return {mean:.1f}")
        if plan is not None:
            parts.append(str(plan).splitlines()[0])
        self._bar.update(self._task, completed=num_timesteps, status=" · ".join(parts))

    def summary(
        self,
        num_timesteps: int,
        run_dir: object,
        plan: object,
        more: Iterable[tuple[str, str]] = (),
    ) -> None:
        """Print a table of what the run came to, with ``more`` rows of it."""
        if not self._enabled:
            return
        table = Table(show_header=False, box=None)
        mean = self.mean_return
        table.add_row("steps", f"{num_timesteps:,} in {time.monotonic() - self._began:.0f} s")
        table.add_row("episodes", f"{self._count:,}")
        if mean is not None:
            table.add_row("mean return", f"{mean:.1f} over the last {len(self._recent)}")
        if plan is not None:
            table.add_row("plan", str(plan).splitlines()[0])
            for name, text in more:
                table.add_row(name, text)
        table.add_row("run", str(run_dir))
        self._console.print(table)

    def __enter__(self) -> Display:
        """Start drawing."""
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Stop drawing, whatever happened."""
        self._bar.stop()
