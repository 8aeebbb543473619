"""Random operations on a rollout buffer and on a list of steps, compared row by row."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import koila_rl
from koila_rl.buffers import RolloutBuffer
from koila_rl.errors import StaleValueError, StorageError

OPERATIONS = ["add", "add", "add", "add", "clear", "epoch", "lazy", "sequences", "save", "reopen"]


class Reference:
    """The rows of each step, in a list."""

    def __init__(self, n_steps: int, n_envs: int) -> None:
        self.n_steps, self.n_envs = n_steps, n_envs
        self.steps: list[list[int]] = []
        self.count = 0

    def next_step(self) -> list[int]:
        first, self.count = self.count, self.count + self.n_envs
        return list(range(first, self.count))

    def rows(self) -> list[int]:
        return [row for step in self.steps for row in step]

    def sequences(self, length: int) -> list[tuple[list[int], list[bool]]]:
        found = []
        for start in range(0, self.n_steps, length):
            for env in range(self.n_envs):
                at = [min(start + j, self.n_steps - 1) for j in range(length)]
                there = [start + j < self.n_steps for j in range(length)]
                found.append(([self.steps[t][env] for t in at], there))
        return found


def transition(rows: list[int]) -> dict[str, Any]:
    row = torch.tensor(rows)
    image = (row % 251).to(torch.uint8)[:, None, None].expand(-1, 2, 3)
    return {"row": row, "observation": {"image": image}, ("next", "reward"): row.double() / 7}


def check(part: Any, rows: list[int]) -> None:
    expected = transition(rows)
    assert part["row"].tolist() == rows
    assert torch.equal(part["observation", "image"], expected["observation"]["image"])
    assert torch.equal(part["next", "reward"], expected["next", "reward"])


@pytest.mark.parametrize("storage", ["ram", "memmap", "path"])
@settings(max_examples=20, deadline=None)
@given(
    n_steps=st.integers(1, 5),
    n_envs=st.integers(1, 4),
    seed=st.integers(0, 2**20),
    size=st.integers(1, 9),
    operations=st.lists(st.sampled_from(OPERATIONS), min_size=5, max_size=30),
)
def test_a_rollout_is_a_list_of_steps(
    storage: str, n_steps: int, n_envs: int, seed: int, size: int, operations: list[str]
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        place: Any = Path(folder) / "rollout" if storage == "path" else storage
        rollout = RolloutBuffer(n_steps, n_envs, seed, storage=place)
        reference = Reference(n_steps, n_envs)
        pending: list[Any] = []
        for operation in operations:
            rollout = apply(operation, rollout, reference, size, Path(folder), pending)
            assert len(rollout) == len(reference.steps)
            if reference.steps:
                check(rollout[:].flatten(), reference.rows())


def apply(
    operation: str, rollout: RolloutBuffer, reference: Reference, size: int, folder: Path,
    pending: list[Any],
) -> RolloutBuffer:  # fmt: skip
    full = len(reference.steps) == reference.n_steps
    if operation == "add":
        rows = reference.next_step()
        if full:
            with pytest.raises(StorageError, match="clear"):
                rollout.add(transition(rows))
            return rollout
        rollout.add(transition(rows))
        reference.steps.append(rows)
        for part in pending:
            with pytest.raises(StaleValueError):
                koila_rl.materialize(part["row"])
        pending.clear()
    elif operation == "clear":
        rollout.clear()
        reference.steps.clear()
    elif operation == "save" and reference.count and rollout.nbytes:
        rollout.save(folder / "saved")
        loaded = RolloutBuffer.load(folder / "saved")
        assert len(loaded) == len(rollout)
        assert (loaded[:] == rollout[:]).all()
    elif operation == "reopen" and rollout.storage.place not in ("ram", "memmap"):
        if rollout.nbytes:
            rollout.flush()
            pending.clear()
            return RolloutBuffer.open(folder / "rollout")
    elif operation in ("epoch", "lazy", "sequences") and not full:
        with pytest.raises(StorageError, match="full"):
            rollout.minibatches(size)
    elif operation == "epoch":
        seen: list[int] = []
        for part in rollout.minibatches(size, lazy=False):
            check(part, part["row"].tolist())
            seen += part["row"].tolist()
        assert sorted(seen) == reference.rows()
    elif operation == "lazy":
        parts = list(rollout.minibatches(size, 2))
        with koila_rl.limits(microbatch=2):
            drawn = [koila_rl.materialize(part) for part in parts[::2]]
        for part in drawn:
            check(part, part["row"].tolist())
            assert set(part["row"].tolist()) <= set(reference.rows())
        pending += parts[1::2]
    elif operation == "sequences":
        found = [
            (row.tolist(), mask.tolist())
            for part in rollout.sequences(size, 2, lazy=False)
            for row, mask in zip(part["row"], part["mask"], strict=True)
        ]
        assert sorted(found) == sorted(reference.sequences(size))
    return rollout
