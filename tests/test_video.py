"""Films of one episode."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from koila_rl.errors import ConfigurationError
from koila_rl.evaluation import evaluate
from koila_rl.video import record
from tests.environments import Counting


class Shown(Counting):
    metadata: dict[str, Any] = {"render_modes": ["rgb_array"], "render_fps": 10}  # noqa: RUF012
    render_mode = "rgb_array"

    def render(self) -> Any:
        return np.full((8, 8, 3), 40 * self.count, np.uint8)


class Still:
    def act(self, observation: Any, deterministic: bool = False) -> Any:
        return np.zeros(len(observation), dtype=np.int64)


def test_a_frame_for_every_state_but_the_next_episodes(tmp_path: Path) -> None:
    assert record(Still(), Shown, tmp_path / "a.gif") == 3
    with Image.open(tmp_path / "a.gif") as film:
        assert film.n_frames == 3  # type: ignore[attr-defined]


def test_evaluate_films_one_more_episode(tmp_path: Path) -> None:
    assert evaluate(Still(), Shown, 2, video=tmp_path / "b.gif").returns == (3.0, 3.0)
    assert (tmp_path / "b.gif").stat().st_size > 0


@pytest.mark.parametrize(
    ("env", "name", "message"),
    [(Shown, "a.png", "end in .gif or .mp4"), (Counting, "a.gif", "rgb_array"), (7, "a.gif", "7")],
)
def test_what_cannot_be_filmed(tmp_path: Path, env: Any, name: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        record(Still(), env, tmp_path / name)
    assert not list(tmp_path.iterdir())
