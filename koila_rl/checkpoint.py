"""Checkpoints that load without running anybody's code and survive a kill at any byte."""

from __future__ import annotations

import io
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from koila_rl.errors import ConfigurationError

__all__ = ["load_state", "save_state", "write_atomically"]

_NUMPY = "__numpy_array__"


def save_state(path: str | Path, state: dict[str, Any]) -> None:
    """Write nested dicts, lists, tuples, numbers, strings, tensors and numpy values.

    The file at ``path`` is the old one or the new one, whole, whenever the process dies.
    """
    content = io.BytesIO()
    torch.save(_without_numpy(state), content)
    write_atomically(path, content.getvalue())


def load_state(path: str | Path, device: torch.device | str = "cpu") -> dict[str, Any]:
    """What :func:`save_state` wrote, tensors on ``device``; no pickled code is run.

    Raises:
        ConfigurationError: There is no such file, or it is not such a checkpoint.
    """
    try:
        state = torch.load(path, map_location=device, weights_only=True)
    except FileNotFoundError as error:
        raise ConfigurationError(f"there is no checkpoint at {path}") from error
    except Exception as error:
        raise ConfigurationError(
            f"{path} is not a checkpoint that can be loaded safely: {type(error).__name__}"
        ) from error
    if not isinstance(state, dict):
        raise ConfigurationError(f"{path} holds a {type(state).__name__}, not a checkpoint")
    return _Checkpoint(path, _with_numpy(state))


class _Checkpoint(dict[str, Any]):
    """What a file held; what it should hold and does not is refused by name."""

    def __init__(self, path: str | Path, state: dict[str, Any]) -> None:
        super().__init__(state)
        self._path = path

    def __missing__(self, key: str) -> Any:
        raise ConfigurationError(
            f"{self._path} lacks {key!r}: it is not whole, or of another version of koila_rl"
        )


def write_atomically(path: str | Path, content: bytes) -> None:
    """Replace the file at ``path`` by ``content`` in one step, creating its folder."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    temporary = Path(name)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            # Without it some file systems order the rename before the data.
            os.fsync(file.fileno())
        # mkstemp's files are private; a checkpoint is as readable as any other file.
        temporary.chmod(0o666 & ~_umask())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _without_numpy(value: Any) -> Any:
    """Numpy scalars as Python numbers and arrays as marked tensors: all that safe loading takes."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return {_NUMPY: torch.from_numpy(value.copy())}
    if isinstance(value, dict):
        return {_without_numpy(key): _without_numpy(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        items = [_without_numpy(item) for item in value]
        return items if isinstance(value, list) else tuple(items)
    return value


def _with_numpy(value: Any) -> Any:
    if isinstance(value, dict):
        if value.keys() == {_NUMPY}:
            return value[_NUMPY].cpu().numpy()
        return {key: _with_numpy(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        items = [_with_numpy(item) for item in value]
        return items if isinstance(value, list) else tuple(items)
    return value
