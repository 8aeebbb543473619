"""Safe loading, atomic writes."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from koila_rl.checkpoint import load_state, save_state
from koila_rl.errors import ConfigurationError


def test_round_trip_with_numpy_scalars_and_random_state(tmp_path: Path) -> None:
    generator = np.random.default_rng(3)
    legacy = np.random.RandomState(3).get_state()
    state = {
        "weights": {"w": torch.arange(3.0)},
        "reward": np.float64(1.5),
        "count": np.int64(7),
        "generator": generator.bit_generator.state,
        "legacy": legacy,
        "mean": np.arange(4, dtype=np.float32),
        "schedule": None,
        "names": ["a", ("b", 2)],
    }
    save_state(tmp_path / "a.pt", state)
    loaded = load_state(tmp_path / "a.pt")
    assert torch.equal(loaded["weights"]["w"], torch.arange(3.0))
    assert loaded["reward"] == 1.5
    assert loaded["count"] == 7
    assert loaded["names"] == ["a", ("b", 2)]
    np.testing.assert_array_equal(loaded["mean"], state["mean"])
    again = np.random.default_rng()
    again.bit_generator.state = loaded["generator"]
    assert again.random() == generator.random()
    restored = np.random.RandomState()
    restored.set_state(loaded["legacy"])
    assert restored.rand() == np.random.RandomState(3).rand()


class Evil:
    def __reduce__(self) -> Any:
        return (os.mkdir, (os.environ["EVIL_FOLDER"],))


def test_pickled_code_is_refused_and_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "made-by-pickle"
    monkeypatch.setenv("EVIL_FOLDER", str(folder))
    torch.save({"x": Evil()}, tmp_path / "torch.pt")
    (tmp_path / "plain.pt").write_bytes(pickle.dumps(Evil()))
    for name in ("torch.pt", "plain.pt"):
        with pytest.raises(ConfigurationError, match="safely"):
            load_state(tmp_path / name)
    assert not folder.exists()


def test_missing_and_foreign_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"no checkpoint at .*missing\.pt"):
        load_state(tmp_path / "missing.pt")
    torch.save([1, 2], tmp_path / "list.pt")
    with pytest.raises(ConfigurationError, match="holds a list"):
        load_state(tmp_path / "list.pt")


def test_what_a_checkpoint_lacks_is_named(tmp_path: Path) -> None:
    save_state(tmp_path / "a.pt", {"step": 1})
    state = load_state(tmp_path / "a.pt")
    assert state.get("weights") is None
    with pytest.raises(ConfigurationError, match=r"a\.pt lacks 'weights'"):
        state["weights"]


class Killed(BaseException):
    """Stands for a signal: not an Exception, so nothing may swallow it."""


@pytest.mark.parametrize("fraction", [0.0, 0.1, 0.5, 0.999, 1.0])
def test_a_save_killed_at_any_byte_leaves_the_last_good_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fraction: float
) -> None:
    path = tmp_path / "agent.pt"
    save_state(path, {"step": 1, "w": torch.zeros(1000)})
    size = path.stat().st_size
    real = os.fdopen

    class Dying:
        def __init__(self, file: Any) -> None:
            self.file = file

        def __enter__(self) -> Dying:
            return self

        def __exit__(self, *error: object) -> None:
            self.file.close()

        def write(self, content: bytes) -> None:
            self.file.write(content[: int(size * fraction)])
            self.file.flush()
            raise Killed

    monkeypatch.setattr(os, "fdopen", lambda *a, **k: Dying(real(*a, **k)))
    with pytest.raises(Killed):
        save_state(path, {"step": 2, "w": torch.ones(1000)})
    assert load_state(path)["step"] == 1


DYING = """
import os, sys
from koila_rl.checkpoint import save_state
os.fsync = lambda *_: os._exit(9)
save_state(sys.argv[1], {"step": 2})
"""


def test_a_process_killed_while_saving_leaves_the_last_good_one(tmp_path: Path) -> None:
    path = tmp_path / "agent.pt"
    save_state(path, {"step": 1})
    # It dies as by SIGKILL between writing the new file and putting it in place.
    assert subprocess.run([sys.executable, "-c", DYING, str(path)]).returncode == 9
    assert load_state(path)["step"] == 1


def test_a_new_checkpoint_replaces_the_old_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    for step in (1, 2):
        save_state(tmp_path / "deep" / "agent.pt", {"step": step})
    assert load_state(tmp_path / "deep" / "agent.pt")["step"] == 2
    assert [p.name for p in (tmp_path / "deep").iterdir()] == ["agent.pt"]
