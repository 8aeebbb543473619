"""CSV, TensorBoard and the learning curve."""

from __future__ import annotations

import csv
from pathlib import Path

from koila_rl.envs import Episode
from koila_rl.metrics import RunLog, draw_learning_curve, read_episodes


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_metrics_that_appear_late_get_a_column(tmp_path: Path) -> None:
    log = RunLog(tmp_path)
    log.add(10, {"a": 1.0})
    log.add(20, {"a": 2.0, "b": 3.5}, [Episode(7.0, 5)])
    log.close()
    assert rows(tmp_path / "metrics.csv") == [
        {"num_timesteps": "10", "a": "1.0", "b": ""},
        {"num_timesteps": "20", "a": "2.0", "b": "3.5"},
    ]
    assert read_episodes(tmp_path) == [(20, 7.0)]


def test_a_run_is_continued(tmp_path: Path) -> None:
    for step in (10, 20):
        log = RunLog(tmp_path)
        log.add(step, {"a": float(step)}, [Episode(float(step), 1)])
        log.close()
    assert [row["a"] for row in rows(tmp_path / "metrics.csv")] == ["10.0", "20.0"]
    assert read_episodes(tmp_path) == [(10, 10.0), (20, 20.0)]


def test_tensorboard_reads_what_was_written(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log = RunLog(tmp_path)
    log.add(10, {"train/loss": 1.5})
    log.add(30, {"train/loss": 0.5})
    log.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    scalars = [(event.step, event.value) for event in events.Scalars("train/loss")]
    assert scalars == [(10, 1.5), (30, 0.5)]


def test_learning_curve_is_a_picture_with_episodes_and_without(tmp_path: Path) -> None:
    for name, episodes in (("some", [(10, 1.0), (20, 2.0)]), ("none", [])):
        path = tmp_path / f"{name}.png"
        draw_learning_curve(path, episodes, "Title")
        assert path.read_bytes().startswith(b"\x89PNG")
