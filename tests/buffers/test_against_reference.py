"""Random operations on a replay buffer and on a list, compared row by row."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tensordict import TensorDict
from torch import Tensor

from koila_rl.buffers import ReplayBuffer
from koila_rl.buffers.rows import ColumnRows
from koila_rl.buffers.tree import Key
from tests.buffers.reference import Reference, Transition

FRAME = (2, 3)


class Environments:
    """Counting environments whose observations stack the last ``k`` frames.

    Frames are all different, so a wrong row shows. An environment resets at once (its next row
    begins a new episode) or, with ``late`` resets, spends a row on it as NEXT_STEP does.
    """

    def __init__(self, n_envs: int, k: int, rng: np.random.Generator, late: bool) -> None:
        self.n_envs, self.k, self.rng, self.late = n_envs, k, rng, late
        self.count = 0
        self.stacks = [self.reset() for _ in range(n_envs)]
        self.over = [False] * n_envs

    def frame(self) -> np.ndarray:
        self.count += 1
        return np.full(FRAME, self.count, dtype=np.int32)

    def reset(self) -> np.ndarray:
        frame = self.frame()
        padding = frame if self.rng.random() < 0.5 else np.zeros_like(frame)
        return np.stack([padding] * (self.k - 1) + [frame])

    def step(self) -> list[Transition]:
        rows = []
        for env in range(self.n_envs):
            observation = self.stacks[env]
            if self.late and self.over[env]:
                self.stacks[env], self.over[env] = self.reset(), False
                rows.append(
                    Transition(observation, 0.0, self.stacks[env], False, False, skipped=True)
                )
                continue
            following = np.concatenate([observation[1:], self.frame()[None]])
            terminated, truncated = (bool(x) for x in self.rng.random(2) < 0.15)
            self.over[env] = terminated or truncated
            reward = float(self.rng.integers(-5, 5))
            rows.append(Transition(observation, reward, following, terminated, truncated, False))
            restart = self.over[env] and not self.late
            self.stacks[env] = self.reset() if restart else following
        return rows


def as_tensordict(rows: list[Transition], first: int) -> tuple[TensorDict, Tensor]:
    n = len(rows)

    def observations(stacks: list[np.ndarray]) -> dict[str, Tensor]:
        image = torch.from_numpy(np.stack(stacks))
        return {"image": image, "speed": image[:, -1, 0, 0].double()}

    following = {
        "observation": observations([row.following for row in rows]),
        "reward": torch.tensor([row.reward for row in rows]),
        "terminated": torch.tensor([row.terminated for row in rows]),
        "truncated": torch.tensor([row.truncated for row in rows]),
    }
    values = {
        "observation": observations([row.observation for row in rows]),
        "row": torch.arange(first, first + n),
        "next": following,
    }
    return TensorDict(values, [n]), torch.tensor([row.skipped for row in rows])


def drawn_from(buffer: ReplayBuffer, size: int) -> dict[Key, ColumnRows]:
    assert buffer._minibatches is not None
    return buffer._minibatches.row_sources(buffer._draw(size, None))


def compare(
    drawn: dict[Key, ColumnRows], reference: Reference, buffer: ReplayBuffer, total: int
) -> None:
    """In microbatches of uneven size, as the engine asks for them."""
    size = drawn["row",].shape[0]
    options = buffer.options
    for start in range(0, size, 3):
        got = {key: rows.read(start, min(size, start + 3)) for key, rows in drawn.items()}
        for i, row in enumerate(got["row",].tolist()):
            expected = reference.all[row]
            window = reference.n_step(row, options.n_steps, options.gamma, total)
            image = got["observation", "image"][i].numpy()
            np.testing.assert_array_equal(image, expected.observation)
            following = got["next", "observation", "image"][i].numpy()
            np.testing.assert_array_equal(following, window["following"])
            assert got["observation", "speed"][i] == expected.observation[-1, 0, 0]
            assert got["next", "observation", "speed"][i] == window["following"][-1, 0, 0]
            assert got["next", "reward"][i].item() == pytest.approx(window["reward"], abs=1e-5)
            assert got["next", "terminated"][i] == window["terminated"]
            assert got["next", "truncated"][i] == window["truncated"]
            if options.n_steps > 1:
                assert got["next", "discount"][i].item() == pytest.approx(window["discount"])


@pytest.mark.parametrize("storage", ["ram", "memmap"])
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    capacity=st.integers(4, 40),
    n_envs=st.integers(1, 3),
    n_steps=st.integers(1, 4),
    frame_stack=st.integers(1, 4),
    late=st.booleans(),
    seed=st.integers(0, 2**20),
    steps=st.lists(st.integers(1, 9), min_size=1, max_size=12),
)
def test_samples_are_the_transitions_that_were_stored(
    storage: str,
    capacity: int,
    n_envs: int,
    n_steps: int,
    frame_stack: int,
    late: bool,
    seed: int,
    steps: list[int],
) -> None:
    capacity = max(capacity, n_envs * n_steps)
    rng = np.random.default_rng(seed)
    environments = Environments(n_envs, max(2, frame_stack), rng, late)
    buffer = ReplayBuffer(
        capacity,
        storage,
        n_steps,
        0.9,
        frame_stack,
        seed=seed,
        n_envs=n_envs,  # type: ignore[arg-type]
    )
    reference = Reference(buffer.capacity, n_envs)
    if frame_stack > 1:
        environments.k = frame_stack
        environments.stacks = [environments.reset() for _ in range(n_envs)]
    pending: list[tuple[dict[Key, ColumnRows], int]] = []
    for count in steps:
        rows = [row for _ in range(count) for row in environments.step()]
        values, skip = as_tensordict(rows, len(reference.all))
        reference.all += rows
        buffer.extend(values, skip=skip)
        assert len(buffer) == len(reference.live())
        for drawn, total in pending:
            compare(drawn, reference, buffer, total)
        if len(buffer) == 0:
            continue
        drawn = drawn_from(buffer, 7)
        assert set(drawn["row",].read(0, 7).tolist()) <= set(reference.live())
        compare(drawn, reference, buffer, len(reference.all))
        pending = [*pending[-1:], (drawn_from(buffer, 5), len(reference.all))]
    if len(buffer):
        rows_there = [int(transition["row"]) for transition in buffer]
        assert rows_there == reference.live()


def test_saved_and_loaded_buffers_give_the_same_samples(tmp_path: Path) -> None:
    environments = Environments(2, 3, np.random.default_rng(0), late=True)
    buffer = ReplayBuffer(20, n_steps=3, frame_stack=3, n_envs=2, seed=5)
    for step in range(17):
        values, skip = as_tensordict(environments.step(), 2 * step)
        buffer.extend(values, skip=skip)
        if step in (4, 16):
            buffer.save(tmp_path / "saved")
            loaded = ReplayBuffer.load(tmp_path / "saved")
            mapped = ReplayBuffer.load(tmp_path / "saved", tmp_path / f"mapped-{step}")
            mapped.flush()
            opened = ReplayBuffer.open(tmp_path / f"mapped-{step}")
            expected = buffer.sample(40, lazy=False)
            for other in (loaded, mapped, opened):
                assert len(other) == len(buffer)
                assert (other.sample(40, lazy=False) == expected).all()
    assert [p.name for p in (tmp_path / "saved").iterdir() if p.is_dir()] == ["2"]


def test_a_pool_that_grows_in_a_named_folder(tmp_path: Path) -> None:
    environments = Environments(1, 3, np.random.default_rng(0), late=False)
    buffer = ReplayBuffer(40, tmp_path / "here", frame_stack=3, n_envs=1)
    rows: list[Transition] = []
    for row in range(60):
        environments.stacks = [environments.reset()]
        rows += environments.step()
        values, _ = as_tensordict(rows[-1:], row)
        buffer.extend(values)
    expected, _ = as_tensordict(rows[-40:], 20)
    assert (buffer[:] == expected).all()
    files = len(list((tmp_path / "here").glob("*.bin")))
    assert files == len(buffer.storage.columns)
    buffer.flush()
    assert (ReplayBuffer.open(tmp_path / "here")[:] == buffer[:]).all()
