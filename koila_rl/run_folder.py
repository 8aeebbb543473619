"""The folder of a run: which one it is, whether it can be written, and what its JSON files say."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from koila_rl.checkpoint import write_atomically
from koila_rl.errors import ConfigurationError

__all__ = [
    "TUNED",
    "as_folder",
    "check_writable",
    "choose",
    "read_config",
    "read_tuned",
    "write_json",
]

TUNED = "tuned.json"


def as_folder(label: str, value: Any) -> Path | None:
    """``value`` as a path, if it is one."""
    if value is None or isinstance(value, str | os.PathLike):
        return None if value is None else Path(value)
    raise ConfigurationError(f"{label} is {value!r}, but must be the path of a folder")


def check_writable(path: Path) -> None:
    """Refuse a run folder that cannot be made or written, before anything is made."""
    existing = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
    if not existing.is_dir():
        raise ConfigurationError(f"run_dir {path} cannot be made: {existing} is a file")
    if not os.access(existing, os.W_OK | os.X_OK) or str(existing.absolute()).startswith("/proc"):
        raise ConfigurationError(f"run_dir {path} cannot be written: {existing} does not allow it")


def choose(run_dir: Path | None, resume: Path | None, env: object, agent: str, seed: int) -> Path:
    """The folder that was named, that of the run that goes on, or a fresh one in ``runs/``.

    Raises:
        ConfigurationError: Another run is in it.
    """
    if run_dir is None and resume is not None:
        return resume
    if run_dir is not None:
        if (run_dir / "config.json").exists() and resume != run_dir:
            raise ConfigurationError(
                f"{run_dir} already holds a run; name another run_dir, or go on with "
                f"resume={run_dir}"
            )
        return run_dir
    label = env if isinstance(env, str) else type(env).__name__
    safe = re.sub(r"[^\w.-]+", "-", label)
    stem = f"{safe}_{agent}_seed{seed}_{time.strftime('%Y%m%d-%H%M%S')}"
    return next(path for path in _numbered(Path("runs") / stem) if not path.exists())


def _numbered(path: Path) -> Iterator[Path]:
    """``path``, then ``path-2``, …: two runs may start in the same second."""
    yield path
    number = 2
    while True:
        yield path.with_name(f"{path.name}-{number}")
        number += 1


def read_config(run_dir: Path) -> dict[str, Any]:
    """What ``config.json`` of a run's folder says."""
    try:
        config: dict[str, Any] = json.loads((run_dir / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{run_dir} is not the folder of a run: {error}") from error
    return config


def read_tuned(run_dir: Path) -> dict[str, int]:
    """Microbatch sizes that a run has timed, by program."""
    try:
        tuned = json.loads((run_dir / TUNED).read_text())
        return {str(name): int(size) for name, size in tuned.items() if int(size) >= 1}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise ConfigurationError(f"{run_dir / TUNED} cannot be read: {error}") from error


def write_json(path: Path, value: dict[str, Any]) -> None:
    """``value`` as indented JSON; what JSON does not have is written as Python shows it."""
    write_atomically(path, (json.dumps(value, indent=2, default=repr) + "\n").encode())
