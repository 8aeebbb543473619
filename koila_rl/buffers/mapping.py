"""Columns in memory-mapped files, described by a JSON file beside them.

A temporary mapping has no name in the file system: its files are unlinked as soon as they
are open, so the system frees them with the process even when it is killed.
"""

from __future__ import annotations

import json
import mmap
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from koila_rl.errors import InsufficientMemoryError, StorageError

__all__ = ["DESCRIPTION", "MappedFile", "MappedFolder", "write_atomically"]

DESCRIPTION = "koila_rl-buffer.json"
_FORMAT = 1


class MappedFile:
    """One file mapped as a tensor."""

    def __init__(self, descriptor: int, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self._pages = mmap.mmap(descriptor, max(1, _nbytes(shape, dtype)))
        count = torch.Size(shape).numel()
        self.tensor: Tensor = torch.frombuffer(self._pages, dtype=dtype, count=count).view(shape)

    def release(self) -> None:
        """Let the resident pages go; what was written stays in the file."""
        if hasattr(mmap, "MADV_DONTNEED"):
            self._pages.madvise(mmap.MADV_DONTNEED)

    def flush(self) -> None:
        """Write what was changed to the disk."""
        self._pages.flush()


class MappedFolder:
    """The mapped files of one buffer."""

    def __init__(self, path: Path, *, unnamed: bool, description: dict[str, Any]) -> None:
        self.path = path
        self.unnamed = unnamed
        self.description = description
        self._mappings: dict[str, MappedFile] = {}

    @classmethod
    def temporary_in(cls, path: Path) -> MappedFolder:
        """Unnamed files in ``path``."""
        return cls(path, unnamed=True, description=_blank())

    @classmethod
    def temporary(cls) -> MappedFolder:
        """Unnamed files in the system's folder for temporary files."""
        return cls.temporary_in(Path(tempfile.gettempdir()))

    @classmethod
    def create(cls, path: Path) -> MappedFolder:
        """A new folder; refuses one that holds anything."""
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            kind = "a buffer" if (path / DESCRIPTION).exists() else "files that are no buffer"
            raise StorageError(
                f"{path} already holds {kind}; open a buffer on purpose with open(path) of its "
                "class, name another folder, or remove it"
            )
        path.mkdir(parents=True, exist_ok=True)
        folder = cls(path, unnamed=False, description=_blank())
        folder.write_description()
        return folder

    @classmethod
    def open(cls, path: Path) -> MappedFolder:
        """An existing folder, verified: description, and the size of every file."""
        source = path / DESCRIPTION
        if not source.exists():
            raise StorageError(f"{path} holds no buffer: {DESCRIPTION} is not there")
        try:
            description = json.loads(source.read_text())
        except ValueError as error:
            raise StorageError(f"{source} is damaged: {error}") from error
        if not isinstance(description, dict) or description.get("format") != _FORMAT:
            raise StorageError(f"{source} is not of format {_FORMAT} of koila_rl's buffers")
        try:
            for label, entry in description["columns"].items():
                if Path(entry["file"]).name != entry["file"]:
                    raise StorageError(f"column {label!r} lies outside {path}: {entry['file']!r}")
                _verify(path / entry["file"], label, entry)
        except (KeyError, TypeError, AttributeError) as error:
            raise StorageError(f"{source} describes no columns of ours: {error!r}") from error
        return cls(path, unnamed=False, description=description)

    def allocate(self, label: str, shape: tuple[int, ...], dtype: torch.dtype) -> MappedFile:
        """A new file of zeros, its blocks reserved on the disk, mapped.

        Of a label that is there already it takes the place; the old mapping stays readable.
        """
        if self.unnamed:
            with tempfile.TemporaryFile(dir=self.path) as file:
                return self._map_new(label, file.fileno(), shape, dtype)
        columns = self.description["columns"]
        replaced = columns.get(label)
        self.description["files"] += 1
        file_name = f"{self.description['files']:02d}-{label.strip('_').replace('/', '_')}.bin"
        with (self.path / file_name).open("xb+") as named:
            mapping = self._map_new(label, named.fileno(), shape, dtype)
        columns[label] = {"file": file_name, "shape": list(shape), "dtype": _dtype_name(dtype)}
        self.write_description()
        if replaced is not None:
            (self.path / replaced["file"]).unlink()
        return mapping

    def open_all(self) -> dict[str, MappedFile]:
        """Every described column, mapped for reading and writing."""
        found = {}
        for label, entry in self.description["columns"].items():
            with (self.path / entry["file"]).open("rb+") as file:
                mapping = MappedFile(file.fileno(), tuple(entry["shape"]), _dtype(entry["dtype"]))
            self._mappings[label] = mapping
            found[label] = mapping
        return found

    def write_description(self) -> None:
        """Write the description anew, whole or not at all."""
        if not self.unnamed:
            text = json.dumps(self.description, indent=1, sort_keys=True)
            write_atomically(self.path / DESCRIPTION, text)

    def flush(self) -> None:
        """Write changed pages and the description to the disk."""
        for mapping in self._mappings.values():
            mapping.flush()
        self.write_description()

    def _map_new(
        self, label: str, descriptor: int, shape: tuple[int, ...], dtype: torch.dtype
    ) -> MappedFile:
        # Without reserved blocks a full disk would end the process with SIGBUS at some write.
        size = _nbytes(shape, dtype)
        try:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(descriptor, 0, max(1, size))
            else:
                os.ftruncate(descriptor, max(1, size))
        except OSError as error:
            raise InsufficientMemoryError(
                f"no room for {size:,} bytes below {self.path}: {error.strerror}; "
                "name a folder on a larger disk or take a smaller capacity"
            ) from error
        mapping = MappedFile(descriptor, shape, dtype)
        self._mappings[label] = mapping
        return mapping


def write_atomically(path: Path, text: str) -> None:
    """Replace a file so that a reader, or a crash, meets the old text or the new, never half."""
    half = path.with_name(f".{path.name}.{os.getpid()}")
    with half.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    half.replace(path)


def _verify(path: Path, label: str, entry: dict[str, Any]) -> None:
    if not path.exists():
        raise StorageError(f"column {label!r} is missing: {path} is not there")
    expected = max(1, _nbytes(tuple(entry["shape"]), _dtype(entry["dtype"])))
    found = path.stat().st_size
    if found != expected:
        raise StorageError(
            f"column {label!r} is truncated or foreign: {path} has {found:,} bytes where its "
            f"description, {entry['dtype']} {entry['shape']}, asks for {expected:,}"
        )


def _blank() -> dict[str, Any]:
    return {"format": _FORMAT, "files": 0, "columns": {}, "buffer": {}}


def _nbytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return torch.Size(shape).numel() * torch.empty(0, dtype=dtype).element_size()


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dtype(text: str) -> torch.dtype:
    dtype = getattr(torch, text, None)
    if not isinstance(dtype, torch.dtype):
        raise StorageError(f"unknown dtype {text!r} in the description of a buffer")
    return dtype
