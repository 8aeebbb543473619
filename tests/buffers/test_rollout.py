from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

import koila_rl
from koila_rl.buffers import ReplayBuffer, RolloutBuffer
from koila_rl.buffers.mapping import DESCRIPTION
from koila_rl.errors import (
    BatchSizeError,
    ConfigurationError,
    InsufficientMemoryError,
    StaleValueError,
    StorageError,
)


def step(t: int, n_envs: int = 3) -> TensorDict:
    row = torch.arange(n_envs) + t * n_envs
    observation = {
        "image": row.to(torch.uint8)[:, None].expand(n_envs, 2),
        "speed": row.to(torch.float64),
    }
    following = {"reward": row.float()[:, None], "done": row % 2 == 0}
    return TensorDict({"observation": observation, "action": row, "next": following}, [n_envs])


def filled(n_steps: int = 5, n_envs: int = 3, seed: int = 0) -> RolloutBuffer:
    rollout = RolloutBuffer(n_steps, n_envs, seed=seed)
    for t in range(n_steps):
        rollout.add(step(t, n_envs))
    return rollout


def test_stores_native_dtypes_and_nesting() -> None:
    rollout = filled()
    assert rollout.full
    assert len(rollout) == 5
    assert rollout.data.batch_size == (5, 3)
    assert rollout.data["observation", "image"].dtype == torch.uint8
    assert rollout.data["observation", "speed"].dtype == torch.float64
    assert rollout.data["next", "done"].dtype == torch.bool
    assert torch.equal(rollout.data["action"], torch.arange(15).view(5, 3))
    assert rollout.nbytes == 15 * (2 + 8 + 8 + 4 + 1)
    assert "observation.image: (5, 3, 2) uint8" in repr(rollout)


def test_tuples_and_arrays_are_nested() -> None:
    rollout = RolloutBuffer(1, 2)
    rollout.add({"observation": (torch.ones(2, 4), torch.zeros(2).numpy()), "reward": [1.0, 2.0]})
    assert rollout.data["observation", "0"].shape == (1, 2, 4)
    assert rollout.data["observation", "1"].shape == (1, 2)
    assert rollout.data["reward"].tolist() == [[1.0, 2.0]]


@pytest.mark.parametrize("batch_size", [1, 4, 7, 15, 100])
def test_every_transition_once_an_epoch(batch_size: int) -> None:
    rollout = filled()
    rollout.data["advantage"] = rollout.data["action"] * 2.0
    epochs = list(rollout.minibatches(batch_size, 2, lazy=False))
    actions = torch.cat([part["action"] for part in epochs])
    assert actions[:15].sort().values.tolist() == list(range(15))
    assert actions[15:].sort().values.tolist() == list(range(15))
    assert not torch.equal(actions[:15], actions[15:])
    for part in epochs:
        assert part.batch_size == part["action"].shape
        assert torch.equal(part["advantage"], part["action"] * 2.0)
        assert torch.equal(part["next", "reward"][:, 0], part["action"].float())
        assert part["observation", "image"].dtype == torch.uint8
    assert max(len(part) for part in epochs) == min(batch_size, 15)


def test_seeds_reproduce() -> None:
    def order(seed: int) -> list[int]:
        parts = filled(seed=seed).minibatches(4, lazy=False)
        return torch.cat([part["action"] for part in parts]).tolist()

    assert order(3) == order(3)
    assert order(3) != order(4)


def test_skipped_rows_are_in_no_minibatch() -> None:
    rollout = filled()
    skip = torch.zeros(5, 3, dtype=torch.bool)
    skip[2, 1] = skip[4, 0] = True
    actions = torch.cat([part["action"] for part in rollout.minibatches(4, skip=skip, lazy=False)])
    assert actions.sort().values.tolist() == [i for i in range(15) if i not in (7, 12)]
    with pytest.raises(ConfigurationError, match="no transition"):
        rollout.minibatches(4, skip=torch.ones(5, 3, dtype=torch.bool))
    with pytest.raises(BatchSizeError, match=r"\(5, 3\)"):
        rollout.minibatches(4, skip=skip[:4])


def test_nothing_stored_carries_a_graph() -> None:
    rollout = RolloutBuffer(1, 2)
    weight = torch.ones(2, requires_grad=True)
    rollout.add({"state_value": weight * 2})
    rollout.data["advantage"] = (weight * 3)[None]
    (part,) = rollout.minibatches(2, lazy=False)
    assert not rollout.data["state_value"].requires_grad
    assert not part["advantage"].requires_grad


def test_collected_under_inference_mode() -> None:
    rollout = RolloutBuffer(2, 3)
    with torch.inference_mode():
        rollout.add(step(0))
        rollout.add(step(1))
    (part,) = rollout.minibatches(6, lazy=False)
    weight = torch.ones((), requires_grad=True)
    (part["next", "reward"] * weight).sum().backward()
    assert weight.grad is not None
    assert weight.grad.item() == 15.0


def test_clear_keeps_memory_and_drops_computed_columns() -> None:
    rollout = filled()
    pointer = rollout.data["action"].data_ptr()
    rollout.data["advantage"] = torch.zeros(5, 3)
    rollout.clear()
    assert len(rollout) == 0
    assert not rollout.full
    assert "advantage" not in rollout.data.keys()  # noqa: SIM118
    rollout.add(step(0))
    assert rollout.data["action"].data_ptr() == pointer


def test_mistakes_are_refused_before_anything_is_stored() -> None:
    rollout = RolloutBuffer(2, 3)
    with pytest.raises(StorageError, match="empty"):
        _ = rollout.data
    with pytest.raises(BatchSizeError, match="n_envs=3"):
        rollout.add(step(0, n_envs=4))
    rollout.add(step(0))
    with pytest.raises(StorageError, match=r"'next\.reward' is torch\.float64"):
        rollout.add(step(1).set(("next", "reward"), torch.zeros(3, 1, dtype=torch.float64)))
    with pytest.raises(StorageError, match="names of the first"):
        rollout.add(step(1).exclude("action"))
    with pytest.raises(StorageError, match="1 of 2 steps"):
        rollout.minibatches(4)
    assert len(rollout) == 1
    rollout.add(step(1))
    with pytest.raises(StorageError, match="clear"):
        rollout.add(step(2))
    with pytest.raises(ConfigurationError, match="batch_size is 0"):
        rollout.minibatches(0)
    with pytest.raises(ConfigurationError, match="n_steps is 0"):
        RolloutBuffer(0, 3)


def test_a_rollout_that_cannot_fit_names_bytes_and_remedy() -> None:
    rollout = RolloutBuffer(10**9, 8)
    with pytest.raises(
        InsufficientMemoryError, match=r"8,000,000,000,000 bytes.*n_steps=1000000000"
    ):
        rollout.add({"observation": torch.zeros(8, 1000, dtype=torch.uint8)})
    assert len(rollout) == 0


def test_strings_are_refused() -> None:
    with pytest.raises(StorageError, match=r"'label'.*numbers"):
        RolloutBuffer(1, 2).add({"label": ["a", "b"]})


def test_a_reused_rollout_is_named() -> None:
    rollout = filled()
    (part,) = rollout.minibatches(15)
    value = part["next", "reward"].exp()
    rollout.clear()
    assert koila_rl.materialize(part["action"]).shape == (15,)
    rollout.add(step(5))
    with pytest.raises(StaleValueError, match=r"'next\.reward' of the rollout was written"):
        value.sum().item()


def test_a_column_written_in_place_is_named() -> None:
    rollout = filled()
    rollout.data["advantage"] = torch.zeros(5, 3)
    first, second = rollout.minibatches(8)
    rollout.data["advantage"] += 1
    assert koila_rl.materialize(first["action"]).shape == (8,)
    with pytest.raises(StaleValueError, match="advantage"):
        koila_rl.materialize(second["advantage"])


@pytest.mark.parametrize("length", [1, 2, 4, 5, 9])
def test_sequences(length: int) -> None:
    rollout = filled()
    seen = []
    for part in rollout.sequences(length, 4, n_epochs=1, lazy=False):
        assert part["action"].shape == (len(part), length)
        for actions, mask in zip(part["action"].tolist(), part["mask"].tolist(), strict=True):
            kept = [action for action, there in zip(actions, mask, strict=True) if there]
            assert kept == list(range(kept[0], kept[0] + 3 * len(kept), 3))
            assert all(action == kept[-1] for action in actions[len(kept) :])
            seen += kept
    assert sorted(seen) == list(range(15))


@pytest.mark.parametrize("storage", ["memmap", "path"])
def test_rollouts_in_files(storage: str, tmp_path: Path) -> None:
    place = "memmap" if storage == "memmap" else tmp_path / "rollout"
    rollout = RolloutBuffer(5, 3, seed=0, storage=place)  # type: ignore[arg-type]
    for t in range(5):
        rollout.add(step(t))
    rollout.data["advantage"] = rollout.data["action"] * 2.0
    weight = torch.zeros((), requires_grad=True)
    total = torch.zeros(())
    with koila_rl.limits(microbatch=2):
        for part in rollout.minibatches(4):
            (
                (part["advantage"] + part["observation", "image"][:, 0]) * weight.exp()
            ).sum().backward()
    assert weight.grad is not None
    assert weight.grad.item() == 3 * sum(range(15))
    assert total == 0


def test_files_of_a_rollout_are_opened_on_purpose(tmp_path: Path) -> None:
    place = tmp_path / "rollout"
    rollout = RolloutBuffer(5, 3, seed=7, storage=place)
    for t in range(4):
        rollout.add(step(t))
    with pytest.raises(StorageError, match="already holds a buffer; open a buffer on purpose"):
        RolloutBuffer(5, 3, storage=place)
    with pytest.raises(StorageError, match="this is a RolloutBuffer, not a ReplayBuffer"):
        ReplayBuffer.open(place)
    opened = RolloutBuffer.open(place)
    assert (len(opened), opened.n_steps, opened.n_envs) == (4, 5, 3)
    assert (opened[:] == rollout[:]).all()
    opened.add(step(4))
    assert len(rollout) == 5  # the same files
    opened.flush()
    again = RolloutBuffer.open(place)
    drawn, expected = again.minibatches(4, 2, lazy=False), opened.minibatches(4, 2, lazy=False)
    assert all((a == b).all() for a, b in zip(drawn, expected, strict=True))


def test_foreign_and_truncated_files_of_a_rollout_are_refused(tmp_path: Path) -> None:
    place = tmp_path / "rollout"
    RolloutBuffer(5, 3, storage=place).add(step(0))
    description = place / DESCRIPTION
    text = description.read_text()
    (column,) = place.glob("*action.bin")
    content = column.read_bytes()
    column.write_bytes(content[:-8])
    with pytest.raises(StorageError, match=r"'action' is truncated or foreign.*112 bytes.*120"):
        RolloutBuffer.open(place)
    column.write_bytes(content)
    for wrong, message in [
        (text.replace('"n_steps": 5', '"n_steps": 6'), r"asks for .*\(18,"),
        (text.replace('"n_steps": 5', '"n_steps": "x"'), "n_steps is 'x'"),
        (text.replace('"leaves"', '"branches"'), "is not ours.*leaves"),
        (text.replace('"columns"', '"rows"'), "no columns of ours"),
        (text.replace('"file": "', '"file": "../'), "lies outside"),
    ]:
        assert wrong != text
        description.write_text(wrong)
        with pytest.raises((StorageError, ConfigurationError), match=message):
            RolloutBuffer.open(place)
    description.write_text(text)
    (steps,) = place.glob("*steps.bin")
    steps.write_bytes((9).to_bytes(8, "little"))
    with pytest.raises(StorageError, match="5 steps cannot hold 9"):
        RolloutBuffer.open(place)
    steps.write_bytes((1).to_bytes(8, "little"))
    assert len(RolloutBuffer.open(place)) == 1


@pytest.mark.parametrize("storage", ["ram", "memmap", "path"])
def test_saved_and_loaded_rollouts_give_the_same_minibatches(storage: str, tmp_path: Path) -> None:
    rollout = filled(seed=3)
    rollout.data["advantage"] = rollout.data["action"].double() / 3
    list(rollout.minibatches(4))
    rollout.save(tmp_path / "saved")
    place: Any = tmp_path / "loaded" if storage == "path" else storage
    loaded = RolloutBuffer.load(tmp_path / "saved", place)
    assert (loaded.data == rollout.data).all()
    if storage == "path":
        loaded.flush()
        loaded = RolloutBuffer.open(place)
    drawn, expected = loaded.minibatches(4, 2, lazy=False), rollout.minibatches(4, 2, lazy=False)
    for ours, theirs in zip(drawn, expected, strict=True):
        # Of files, a minibatch is read from front to back.
        order = slice(None) if storage == "ram" else theirs["action"].argsort()
        assert (ours == theirs[order]).all()
    with pytest.raises(StorageError, match="empty"):
        RolloutBuffer(2, 2).save(tmp_path / "saved")


def test_steps_by_position() -> None:
    rollout = RolloutBuffer(5, 3)
    for t in range(3):
        rollout.add(step(t))
    assert [int(part["action"][0]) for part in rollout] == [0, 3, 6]
    assert rollout[-1]["action"].tolist() == [6, 7, 8]
    assert rollout[1:].batch_size == (2, 3)


def test_nothing_moves_before_a_value_is_needed() -> None:
    rollout = filled()
    part = next(rollout.minibatches(6))
    loss = (part["next", "reward"] * 2).sum()
    assert rollout.bytes_read == 0
    loss.item()
    assert rollout.bytes_read == 6 * 4
