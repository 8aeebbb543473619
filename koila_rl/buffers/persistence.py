"""Saving, loading and opening buffers.

A save is a folder of numbered versions and a file that names the current one, replaced when the
new version is complete: a save killed at any byte leaves the one before.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from koila_rl.buffers.mapping import MappedFolder, write_atomically
from koila_rl.buffers.storage import Place, Storage, Stored
from koila_rl.errors import StorageError

__all__ = ["flush", "load", "open_folder", "save"]

_CURRENT = "current"
_BYTES_AT_ONCE = 64 * 2**20


class Persistent(Protocol):
    """A buffer that can be written down."""

    @property
    def storage(self) -> Storage:
        """Where the columns lie."""

    def saved_columns(self) -> dict[str, tuple[Stored, int]]:
        """What a save holds: columns, and how many of their rows were ever written."""

    def state(self) -> dict[str, Any]:
        """What the buffer is beside its columns, as JSON takes it."""

    @classmethod
    def restored(cls, state: dict[str, Any], storage: Storage, settings: dict[str, Any]) -> Any:
        """The buffer of a state over columns that are filled already."""


def save(buffer: Persistent, path: Path) -> None:
    """Write a new version below ``path`` and make it the current one."""
    path.mkdir(parents=True, exist_ok=True)
    entries = [entry.name for entry in path.iterdir() if not entry.name.startswith(".")]
    versions = [name for name in entries if name.isdigit()]
    if foreign := sorted(set(entries) - set(versions) - {_CURRENT}):
        raise StorageError(f"{path} holds files that are no save of a buffer: {foreign[:3]}")
    target = path / str(max(map(int, versions), default=0) + 1)
    folder = MappedFolder.create(target)
    sizes = {}
    for label, (column, rows) in buffer.saved_columns().items():
        sizes[label] = len(column.tensor)
        shape = (rows, *column.tensor.shape[1:])
        copy = folder.allocate(label, shape, column.tensor.dtype)
        _copy(column, Stored(buffer.storage, copy.tensor, copy), rows)
    folder.description["buffer"] = {**buffer.state(), "sizes": sizes}
    folder.flush()
    write_atomically(path / _CURRENT, target.name)
    for version in versions:
        shutil.rmtree(path / version, ignore_errors=True)


def load(kind: type[Persistent], path: Path, place: Place, settings: dict[str, Any]) -> Any:
    """The current version below ``path``, copied into a storage of its own."""
    if not (path / _CURRENT).exists():
        raise StorageError(f"{path} holds no saved buffer")
    folder = MappedFolder.open(path / (path / _CURRENT).read_text().strip())
    source = Storage(path, folder=folder)
    source.open()
    state = folder.description["buffer"]
    device = settings.get("device")
    target = Storage(place, None if device is None else torch.device(device))
    sizes = state["sizes"]
    target.check(
        sum(column.row_bytes * sizes[label] for label, column in source.columns.items()),
        "load it with storage=Path(…), a folder on a larger disk",
    )
    for label, column in source.columns.items():
        shape = (sizes[label], *column.tensor.shape[1:])
        host = label.startswith("_") and not label.startswith("_pool/")
        kept = target.allocate(label, shape, column.tensor.dtype, host=host)
        _copy(column, kept, len(column.tensor))
    return _restored(kind, state, target, settings)


def open_folder(kind: type[Persistent], path: Path, settings: dict[str, Any]) -> Any:
    """The buffer whose mapped files lie in ``path``."""
    folder = MappedFolder.open(path)
    if not folder.description["buffer"]:
        raise StorageError(f"{path} holds a buffer that nothing was ever stored in; remove it")
    storage = Storage(path, folder=folder)
    storage.open()
    return _restored(kind, folder.description["buffer"], storage, settings)


def flush(buffer: Persistent) -> None:
    """Bring the description of a mapped folder up to date, and both to the disk."""
    folder = buffer.storage.folder
    if folder is not None:
        folder.description["buffer"] = buffer.state()
        folder.flush()


def _restored(
    kind: type[Persistent], state: dict[str, Any], storage: Storage, settings: dict[str, Any]
) -> Any:
    if state.get("kind") != kind.__name__:
        raise StorageError(f"this is a {state.get('kind')}, not a {kind.__name__}")
    try:
        return kind.restored(state, storage, settings)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise StorageError(f"the description of the buffer is not ours: {error!r}") from error


def _copy(source: Stored, target: Stored, rows: int) -> None:
    step = max(1, _BYTES_AT_ONCE // max(1, source.row_bytes))
    for start in range(0, rows, step):
        target.put(start, source.take(np.arange(start, min(rows, start + step))))
        source.release()
        target.release()
