"""Where columns lie: what is refused, what is left behind, what survives a kill."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

from koila_rl.buffers import ReplayBuffer
from koila_rl.buffers.mapping import DESCRIPTION
from koila_rl.errors import ConfigurationError, InsufficientMemoryError, StorageError
from koila_rl.memory.simulated import SimulatedDevice


def transitions(first: int, n: int) -> TensorDict:
    row = torch.arange(first, first + n)
    return TensorDict({"row": row, "next": {"reward": row.float()[:, None]}}, [n])


DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int16,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.float8_e4m3fn,
]


@pytest.mark.parametrize("storage", ["ram", "device", "memmap", "path"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_native_dtypes(storage: str, dtype: torch.dtype, tmp_path: Path) -> None:
    place = tmp_path / "here" if storage == "path" else storage
    buffer = ReplayBuffer(6, place, seed=0, device="cpu")  # type: ignore[arg-type]
    values = torch.arange(10).remainder(2).view(10, 1).expand(10, 3).to(torch.float32).to(dtype)
    buffer.extend({"x": values, "scalar": values[:, 0]})
    got = buffer[:]
    assert got["x"].dtype == dtype
    kept = values[4:].to(torch.complex64)
    assert torch.equal(got["x"].to(torch.complex64), kept)
    assert torch.equal(got["scalar"].to(torch.complex64), kept[:, 0])


def test_a_folder_is_never_reused_in_silence(tmp_path: Path) -> None:
    place = tmp_path / "buffer"
    buffer = ReplayBuffer(4, place, seed=0)
    buffer.extend(transitions(0, 6))
    with pytest.raises(StorageError, match=r"already holds a buffer.*open\(path\)"):
        ReplayBuffer(4, place)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("mine")
    with pytest.raises(StorageError, match="files that are no buffer"):
        ReplayBuffer(4, tmp_path / "other")
    with pytest.raises(StorageError, match="holds no buffer"):
        ReplayBuffer.open(tmp_path / "other")
    del buffer
    assert ReplayBuffer.open(place)[:]["row"].tolist() == [2, 3, 4, 5]


def test_foreign_and_truncated_files_are_refused(tmp_path: Path) -> None:
    place = tmp_path / "buffer"
    ReplayBuffer(4, place).extend(transitions(0, 4))
    (column,) = place.glob("*row.bin")
    content = column.read_bytes()
    column.write_bytes(content[:-8])
    with pytest.raises(StorageError, match=r"'row' is truncated or foreign.*24 bytes.*asks for 32"):
        ReplayBuffer.open(place)
    column.unlink()
    with pytest.raises(StorageError, match="'row' is missing"):
        ReplayBuffer.open(place)
    column.write_bytes(content)
    assert len(ReplayBuffer.open(place)) == 4
    (place / DESCRIPTION).write_text('{"format": 99}')
    with pytest.raises(StorageError, match="not of format"):
        ReplayBuffer.open(place)
    (place / DESCRIPTION).write_text('{"format": ')
    with pytest.raises(StorageError, match="damaged"):
        ReplayBuffer.open(place)


KILLED = """
import os, signal, sys, pathlib, torch
from koila_rl.buffers import ReplayBuffer
place = "memmap" if sys.argv[1] == "memmap" else pathlib.Path(sys.argv[1])
buffer = ReplayBuffer(4, place, seed=0)
for row in range(6):
    buffer.extend({"row": torch.tensor([row])})
assert buffer[:]["row"].tolist() == [2, 3, 4, 5]
os.kill(os.getpid(), signal.SIGKILL)
"""


def killed(place: str, folder: Path) -> None:
    environment = {**os.environ, "TMPDIR": str(folder)}
    ended = subprocess.run([sys.executable, "-c", KILLED, place], env=environment, check=False)
    assert ended.returncode == -signal.SIGKILL


def test_a_killed_process_leaves_no_temporary_files(tmp_path: Path) -> None:
    killed("memmap", tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_killed_process_leaves_the_named_folder_readable(tmp_path: Path) -> None:
    place = tmp_path / "kept"
    killed(str(place), tmp_path)
    buffer = ReplayBuffer.open(place)
    assert buffer[:]["row"].tolist() == [2, 3, 4, 5]
    buffer.extend({"row": torch.tensor([6])})
    assert buffer[:]["row"].tolist() == [3, 4, 5, 6]


def test_rows_half_written_by_a_killed_process_are_not_counted(tmp_path: Path) -> None:
    buffer = ReplayBuffer(4, tmp_path / "buffer")
    buffer.extend(transitions(0, 6))
    # As killed in the middle of the next extend of two: begun, not finished.
    buffer._ring.begin(2)
    opened = ReplayBuffer.open(tmp_path / "buffer")
    assert opened[:]["row"].tolist() == [4, 5]


@pytest.mark.parametrize("storage", ["ram", "memmap", "path"])
def test_what_cannot_fit_is_refused_before_anything_is_taken(storage: str, tmp_path: Path) -> None:
    place = tmp_path / "buffer" if storage == "path" else storage
    buffer = ReplayBuffer(1_000_000, place)  # type: ignore[arg-type]
    frames = {"observation": torch.zeros(1, 3, 960, 720, dtype=torch.uint8)}
    with pytest.raises(
        InsufficientMemoryError,
        match=r"2,073,60\d,\d{3},000 bytes\).*\) are free; take a smaller capacity.*storage=Path",
    ):
        buffer.extend(frames)
    assert len(buffer) == 0
    assert "observation" not in buffer.storage.columns


def test_a_simulated_device_does_not_limit_host_storage() -> None:
    with SimulatedDevice("64KiB"):
        buffer = ReplayBuffer(100)
        buffer.extend({"observation": torch.zeros(1, 10_000)})
    assert buffer.nbytes > 100 * 40_000


def test_storages_that_are_not_there() -> None:
    with pytest.raises(ConfigurationError, match="'disk'"):
        ReplayBuffer(4, "disk")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="needs device"):
        ReplayBuffer(4, "device")
    if not torch.cuda.is_available():
        with pytest.raises(ConfigurationError, match="needs CUDA"):
            ReplayBuffer(4, "pinned")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_device_observations_in_host_storage_leave_device_memory_flat() -> None:
    buffer = ReplayBuffer(2000, device="cuda")
    observation = torch.zeros(8, 1000, device="cuda")
    buffer.extend({"observation": observation})
    before = torch.cuda.memory_allocated()
    for _ in range(1000):
        buffer.extend({"observation": observation})
    assert torch.cuda.memory_allocated() == before


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("storage", ["ram", "pinned", "device", "memmap"])
def test_delivery_to_a_gpu(storage: str) -> None:
    buffer = ReplayBuffer(100, storage, device="cuda", seed=0)  # type: ignore[arg-type]
    buffer.extend(transitions(0, 100))
    assert buffer._minibatches is not None
    rows = buffer._minibatches.row_sources(buffer._draw(32, None))
    expected = rows["row",].read(0, 32)
    assert expected.device.type == "cuda"
    prefetch = rows["row",].prefetch
    assert (prefetch is None) == (storage == "device")
    if prefetch is not None:
        assert torch.equal(rows["row",].read(8, 16, prefetch(8, 16)), expected[8:16])
        prefetch(16, 24).drop()
    assert torch.equal(rows["row",].read(8, 16), expected[8:16])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_rows_copied_ahead_wait_for_what_used_their_memory_before() -> None:
    buffer = ReplayBuffer(4096, device="cuda", seed=0)
    buffer.extend({"row": torch.arange(4096.0)[:, None].expand(4096, 1000)})
    assert buffer._minibatches is not None
    rows = buffer._minibatches.row_sources(buffer._draw(4096, None))["row",]
    assert rows.prefetch is not None
    expected = rows.read(0, 4096)
    busy = torch.randn(4096, 4096, device="cuda")
    for start in range(0, 4096, 512):
        # The device is behind, and still to use memory that is free for the host.
        used = torch.zeros(512, 1000, device="cuda")
        for _ in range(20):
            busy = busy @ busy / 64
        result = used + busy.sum() * 0
        del used
        ahead = rows.prefetch(start, start + 512)
        assert torch.equal(rows.read(start, start + 512, ahead), expected[start : start + 512])
        assert (result.nan_to_num() == 0).all()
