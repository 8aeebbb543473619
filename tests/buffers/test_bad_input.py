"""Bad input is refused by name before anything changes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from koila_rl.buffers import PrioritizedReplayBuffer, ReplayBuffer, RolloutBuffer
from koila_rl.buffers.samplers import Sequential, Subset, Weighted
from koila_rl.errors import BatchSizeError, ConfigurationError, KoilaError, StorageError

CONSTRUCTED: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], str]] = [
    (RolloutBuffer, (1.5, 2), {}, r"n_steps is 1\.5 \(float\); it must be a whole number"),
    (RolloutBuffer, (2, "3"), {}, r"n_envs is '3' \(str\)"),
    (RolloutBuffer, (-1, 2), {}, r"n_steps is -1; it must be 1 or more"),
    (RolloutBuffer, (True, 2), {}, r"n_steps is True \(bool\)"),
    (RolloutBuffer, (2, 2), {"seed": -1}, r"seed is -1"),
    (RolloutBuffer, (2, 2), {"device": "gpu"}, r"'gpu' is not a device"),
    (RolloutBuffer, (2, 2), {"storage": 3}, r"storage is 3"),
    (RolloutBuffer, (2, 2), {"transforms": {"image": 255}}, r"transform of 'image' is 255"),
    (ReplayBuffer, (2.5,), {}, r"capacity is 2\.5 \(float\)"),
    (ReplayBuffer, ("x",), {}, r"capacity is 'x' \(str\)"),
    (ReplayBuffer, (-4,), {}, r"capacity is -4; it must be 1 or more"),
    (ReplayBuffer, (3,), {"n_envs": 4}, r"capacity is 3; n_envs=4"),
    (ReplayBuffer, (4,), {"n_envs": 0}, r"n_envs is 0"),
    (ReplayBuffer, (4,), {"n_steps": 1.0}, r"n_steps is 1\.0"),
    (ReplayBuffer, (4,), {"gamma": "0.9"}, r"gamma is '0\.9'"),
    (ReplayBuffer, (4,), {"gamma": float("nan")}, r"gamma is nan"),
    (ReplayBuffer, (4,), {"frame_stack": -1}, r"frame_stack is -1"),
    (ReplayBuffer, (4,), {"frame_dim": 0.5}, r"frame_dim is 0\.5"),
    (ReplayBuffer, (4,), {"storage": "disk"}, r"storage is 'disk'; it must be 'ram'"),
    (ReplayBuffer, (4,), {"seed": "x"}, r"seed is 'x'"),
    (ReplayBuffer, (4,), {"save_limit": -1}, r"save_limit is -1"),
    (ReplayBuffer, (4,), {"device": 3.5}, r"device is 3\.5"),
    (PrioritizedReplayBuffer, (4,), {"alpha": "x"}, r"alpha is 'x'"),
    (PrioritizedReplayBuffer, (4,), {"beta": -0.1}, r"beta is -0\.1; it must be a number, 0"),
    (PrioritizedReplayBuffer, (4,), {"eps": float("inf")}, r"eps is inf"),
    (Subset, ([0.5],), {}, r"whole numbers"),
    (Subset, ("ab",), {}, r"whole numbers"),
    (Weighted, (["a"],), {}, r"weights are numbers"),
]


@pytest.mark.parametrize(("build", "args", "settings", "message"), CONSTRUCTED)
def test_constructors(
    build: Any, args: tuple[Any, ...], settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        build(*args, **settings)
    if build not in (Subset, Weighted) and "storage" not in settings:
        place = tmp_path / "place"
        with pytest.raises(ConfigurationError, match=message):
            build(*args, **settings, storage=place)
        assert not place.exists()


def filled(**settings: Any) -> ReplayBuffer:
    buffer = ReplayBuffer(8, seed=0, **settings)
    for row in range(5):
        buffer.add(observation=np.full(2, row, dtype=np.float32), next={"reward": float(row)})
    return buffer


@pytest.mark.parametrize(
    ("transitions", "message"),
    [
        (3, "transitions are a int"),
        (None, "transitions are a NoneType"),
        ([{"observation": torch.zeros(1, 2)}], "transitions are a list"),
        ({}, "hold no tensors"),
        ({"observation": torch.zeros(1, 2), "next": {"reward": [[1.0], [1.0, 2.0]]}}, "reward"),
        ({"observation": torch.zeros(1, 2), "next": {"reward": ["a"]}}, "a buffer stores numbers"),
        ({"observation": torch.zeros(1, 3), "next": {"reward": torch.zeros(1)}}, "'observation'"),
        ({"observation": torch.zeros(1, 2), "next": {"reward": torch.zeros(2)}}, "rows"),
    ],
)
def test_extend(transitions: Any, message: str) -> None:
    buffer = filled()
    with pytest.raises(KoilaError, match=message):
        buffer.extend(transitions)
    assert (len(buffer), buffer.rows_stored) == (5, 5)
    with pytest.raises(KoilaError):
        ReplayBuffer(4).extend({} if not isinstance(transitions, dict) else {"a": "text"})


@pytest.mark.parametrize(
    "transition",
    [
        {},
        {"observation": 3},
        {"observation": None},
        {"observation": "x"},
        {"observation": np.zeros(2, dtype=np.float64), "next": {"reward": 0.0}},
        {"observation": np.zeros(2, dtype=np.float32), "next": {"reward": True}},
        {"observation": np.zeros(2, dtype=np.float32), "next": {"reward": 10**400}},
        {"observation": np.zeros(2, dtype=np.float32), "next": {"reward": 0.0, "more": 1}},
    ],
)
def test_add(transition: dict[str, Any]) -> None:
    buffer = filled()
    with pytest.raises(KoilaError):
        buffer.add(**transition)
    assert (len(buffer), buffer.rows_stored) == (5, 5)
    assert buffer[:]["next", "reward"].tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("storage", ["ram", "memmap"])
@pytest.mark.parametrize("frame_stack", [1, 2])
def test_python_numbers_are_stored_as_they_are_or_refused(storage: Any, frame_stack: int) -> None:
    buffer = ReplayBuffer(8, storage, frame_stack=frame_stack, n_envs=1)
    stack = torch.zeros(2, 3)

    def add(action: Any, reward: Any) -> None:
        buffer.add(observation=stack, action=action, next={"observation": stack, "reward": reward})

    add(torch.tensor(0, dtype=torch.uint8), torch.tensor(0.5, dtype=torch.float64))
    add(255, 0.1)
    add(1, 7)
    assert buffer[:]["action"].tolist() == [0, 255, 1]
    assert buffer[:]["next", "reward"].tolist() == [0.5, 0.1, 7.0]
    for action, reward in [(256, 0.0), (-1, 0.0), (0.5, 0.0), (True, 0.0)]:
        with pytest.raises(StorageError, match="'action' is"):
            add(action, reward)
    assert len(buffer) == 3


@pytest.mark.parametrize("size", [0, -1, 2.5, "x", None, True])
def test_sizes(size: Any) -> None:
    buffer = filled()
    prioritized = PrioritizedReplayBuffer(4)
    prioritized.extend({"row": torch.arange(4)})
    rollout = RolloutBuffer(1, 2)
    rollout.add({"row": torch.arange(2)})
    calls: list[Callable[[], object]] = [
        lambda: buffer.sample(size),
        lambda: buffer.sequences(size, 2),
        lambda: buffer.sequences(2, size),
        lambda: list(buffer.minibatches(size)),
        lambda: list(buffer.minibatches(2, size)),
        lambda: prioritized.sample(size),
        lambda: rollout.minibatches(size),
        lambda: rollout.minibatches(1, size),
        lambda: rollout.sequences(size, 1),
        lambda: rollout.sequences(1, size),
    ]
    for call in calls:
        with pytest.raises(ConfigurationError, match=r"(batch_size|length|n_epochs) is"):
            call()


class Wild:
    def draw(self, n: int, size: int, generator: np.random.Generator) -> Any:
        return np.array([n])

    def epoch_size(self, n: int) -> int:
        return n


def test_samplers_masks_and_priorities() -> None:
    buffer = filled()
    with pytest.raises(ConfigurationError, match=r"sampler is 5; it must have draw"):
        buffer.sample(2, 5)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match=r"Wild drew \[5\] of 5 transitions"):
        buffer.sample(2, Wild())
    assert len(buffer.sample(2, Sequential())) == 2
    with pytest.raises(BatchSizeError, match=r"skip is list; it must be a bool tensor of shape"):
        buffer.extend(filled()[:], skip=[True] * 5)  # type: ignore[arg-type]
    prioritized = PrioritizedReplayBuffer(4)
    prioritized.extend({"row": torch.arange(4)})
    with pytest.raises(ConfigurationError, match="no 'index'"):
        prioritized.update_priorities(buffer.sample(2), torch.zeros(2))
    rollout = RolloutBuffer(1, 2)
    rollout.add({"row": torch.arange(2)})
    with pytest.raises(BatchSizeError, match=r"skip is list"):
        rollout.minibatches(1, skip=[False, True])  # type: ignore[arg-type]
    with pytest.raises(StorageError, match="must not hold '/'"):
        RolloutBuffer(1, 2).add({"a/b": torch.zeros(2)})
