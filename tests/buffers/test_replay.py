from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

import koila_rl
from koila_rl.buffers import PrioritizedReplayBuffer, ReplayBuffer, persistence
from koila_rl.errors import BatchSizeError, ConfigurationError, StaleValueError, StorageError


def transitions(first: int, n: int) -> TensorDict:
    row = torch.arange(first, first + n)
    following = {"reward": row.float(), "terminated": row % 4 == 3, "truncated": row < 0}
    return TensorDict({"row": row, "observation": row.double()[:, None], "next": following}, [n])


def ended(reward: float, terminated: bool, truncated: bool, following: float) -> TensorDict:
    values = {
        "observation": torch.tensor([[following]]),
        "reward": torch.tensor([reward]),
        "terminated": torch.tensor([terminated]),
        "truncated": torch.tensor([truncated]),
    }
    return TensorDict({"observation": torch.zeros(1, 1), "next": values}, [1])


def targets(buffer: ReplayBuffer, value: float = 10.0) -> list[float]:
    sample = buffer[:]["next"]
    keep = 1 - sample["terminated"].float()
    return (sample["reward"] + sample["discount"] * keep * value).tolist()


def test_n_step_stops_at_truncation_and_bootstraps() -> None:
    buffer = ReplayBuffer(10, n_steps=3, gamma=0.9)
    buffer.extend(ended(1, False, False, 1))
    buffer.extend(ended(1, False, True, 2))
    buffer.extend(ended(1, False, False, 3))
    assert targets(buffer)[0] == pytest.approx(10.0)
    assert buffer[0]["next", "observation"].tolist() == [2.0]


@pytest.mark.parametrize(
    ("terminated", "truncated", "target"), [(False, True, 10), (True, False, 1), (True, True, 1)]
)
def test_truncation(terminated: bool, truncated: bool, target: float) -> None:
    buffer = ReplayBuffer(4, n_steps=2, gamma=0.9)
    buffer.extend(ended(1, terminated, truncated, 1))
    buffer.extend(ended(1, False, False, 2))
    assert targets(buffer)[0] == pytest.approx(target)


def test_n_step_across_a_wrapped_ring() -> None:
    buffer = ReplayBuffer(3, n_steps=3, gamma=0.9)
    for step in range(5):
        buffer.extend(ended(1, False, step == 3, step + 1.0))
    # Rows 2, 3 (truncated) and 4; row 4 lies in the slot before row 2.
    assert targets(buffer) == pytest.approx([1 + 0.9 + 0.81 * 10, 10.0, 10.0])
    assert buffer[0]["next", "observation"].tolist() == [4.0]


def test_reset_rows_are_in_no_sample() -> None:
    buffer = ReplayBuffer(10, n_steps=2, gamma=1.0, seed=0)
    # An environment that counts up and terminates at 3, with NEXT_STEP autoreset.
    rows = [(0, 1, False), (1, 2, False), (2, 3, True), (3, 0, None), (0, 1, False)]
    for state, following, over in rows:
        values = {
            "observation": torch.tensor([following]),
            "reward": torch.tensor([0.0 if over is None else 1.0]),
            "terminated": torch.tensor([bool(over)]),
        }
        transition = TensorDict({"observation": torch.tensor([state]), "next": values}, [1])
        buffer.extend(transition, skip=torch.tensor([over is None]))
    assert len(buffer) == 4
    assert buffer[:]["observation"].tolist() == [0, 1, 2, 0]
    assert buffer[:]["next", "reward"].tolist() == [2.0, 2.0, 1.0, 1.0]
    assert 3 not in buffer.sample(500, lazy=False)["observation"]
    shuffled = torch.cat([part["observation"] for part in buffer.minibatches(3, 1, lazy=False)])
    assert sorted(shuffled.tolist()) == [0, 0, 1, 2]


def test_ten_thousand_steps_of_stacked_frames_take_one_frame_each() -> None:
    buffer = ReplayBuffer(10_000, frame_stack=4, n_envs=1)
    frames = torch.randint(0, 256, (10_200, 12, 12), dtype=torch.uint8)
    start = 0
    for length in (2500,) * 4:
        index = torch.arange(start, start + length)[:, None] + torch.arange(4)
        start += length + 4
        over = torch.zeros(length, dtype=torch.bool)
        over[-1] = True
        values = {"image": frames[index]}
        following = {"image": frames[index + 1]}
        buffer.extend(
            {
                "observation": values,
                "next": {"observation": following, "truncated": over, "reward": over.float()},
            }
        )
    assert buffer.nbytes < 1.25 * 10_000 * 144
    got = buffer[[2498, 2499, 2500, 9999]]
    assert got["observation", "image"].dtype == torch.uint8
    expected = [frames[at : at + 4] for at in (2498, 2499, 2504, 9999 + 12)]
    assert torch.equal(got["observation", "image"], torch.stack(expected))
    expected = [frames[at : at + 4] for at in (2499, 2500, 2505, 10000 + 12)]
    assert torch.equal(got["next", "observation", "image"], torch.stack(expected))


def test_frames_stacked_in_channels() -> None:
    buffer = ReplayBuffer(50, frame_stack=2, frame_dim=-1, n_envs=1)
    frames = torch.randint(0, 256, (81, 5, 5, 3), dtype=torch.uint8)
    stacks = torch.cat([frames[:-1], frames[1:]], dim=-1)
    buffer.extend({"observation": stacks[:-1], "next": {"observation": stacks[1:]}})
    assert torch.equal(buffer[:]["observation"], stacks[-51:-1])
    assert torch.equal(buffer[:]["next", "observation"], stacks[-50:])
    with pytest.raises(ConfigurationError, match="does not fit"):
        ReplayBuffer(50, frame_stack=4, frame_dim=-1, n_envs=1).extend(
            {"observation": stacks[:4], "next": {"observation": stacks[1:5]}}
        )


def test_sampling_moves_nothing_and_small_reads_read_one_column() -> None:
    buffer = ReplayBuffer(100, seed=0)
    buffer.extend(transitions(0, 100))
    sample = buffer.sample(64)
    mean = sample["next", "reward"].mean()
    assert buffer.bytes_read == 0
    mean.item()
    assert buffer.bytes_read == 64 * 4


@pytest.mark.parametrize("storage", ["ram", "memmap"])
@pytest.mark.parametrize("n_steps", [1, 3])
def test_rows_overwritten_before_backward_are_as_sampled(storage: Any, n_steps: int) -> None:
    buffer = ReplayBuffer(50, storage, n_steps, seed=0)
    buffer.extend(transitions(0, 50), skip=None) if n_steps == 1 else [
        buffer.extend(transitions(row, 1)) for row in range(50)
    ]
    sample = buffer.sample(40)
    rows = buffer.sample(40, lazy=False)
    twin = ReplayBuffer(50, storage, n_steps, seed=0)
    for row in range(50):
        twin.extend(transitions(row, 1))
    expected = twin.sample(40, lazy=False)
    weight = torch.ones((), dtype=torch.float64, requires_grad=True)
    scaled = sample["observation"][:, 0] * sample["next", "reward"]
    loss = (scaled * weight).pow(2).mean()
    for row in range(50, 95):
        buffer.extend(transitions(row, 1))
    with koila_rl.limits(microbatch=7):
        loss.backward()
    assert weight.grad is not None
    whole = (expected["observation"][:, 0] * expected["next", "reward"]).pow(2).mean() * 2
    assert weight.grad.item() == pytest.approx(whole.item(), rel=1e-12)
    assert rows["row"].max() < 50


def test_what_cannot_be_kept_is_stale_by_name() -> None:
    buffer = ReplayBuffer(50, seed=0, save_limit=100)
    buffer.extend(transitions(0, 50))
    sample = buffer.sample(40)
    loss = sample["observation"].sum()
    buffer.extend(transitions(50, 49))
    with pytest.raises(StaleValueError, match=r"of this minibatch's 40 rows.*save_limit"):
        loss.item()


def test_nothing_stored_carries_a_graph() -> None:
    buffer = ReplayBuffer(4)
    weight = torch.ones(2, requires_grad=True)
    buffer.extend({"value": weight * 2})
    buffer.add(value=weight.sum())
    assert not buffer[:]["value"].requires_grad


def test_add_is_extend_by_one() -> None:
    one, many = ReplayBuffer(5, seed=0), ReplayBuffer(5, seed=0)
    for row in range(12):
        values = transitions(row, 1)
        many.extend(values)
        kinds: list[Any] = [lambda x: x, lambda x: x.numpy(), lambda x: x.numpy()[()]]
        change = kinds[row % 3]
        one.add(
            row=change(values["row"][0]),
            observation=values["observation"][0],
            next={key: change(values["next", key][0]) for key in ("reward", "terminated")}
            | {"truncated": False},
        )
    assert (one[:] == many[:]).all()
    assert (one.sample(20, lazy=False) == many.sample(20, lazy=False)).all()


def test_mistakes_are_refused_before_anything_is_stored() -> None:
    buffer = ReplayBuffer(10, n_steps=1)
    with pytest.raises(StorageError, match="no transitions"):
        buffer.sample(4)
    buffer.extend(transitions(0, 2))
    with pytest.raises(StorageError, match="names of the first"):
        buffer.extend(transitions(2, 2).exclude("row"))
    with pytest.raises(StorageError, match="names of the first"):
        buffer.extend(transitions(2, 2).set("more", torch.zeros(2)))
    with pytest.raises(StorageError, match=r"'row' is torch\.int32"):
        buffer.extend(transitions(2, 2).set("row", torch.zeros(2, dtype=torch.int32)))
    with pytest.raises(BatchSizeError, match="skip"):
        buffer.extend(transitions(2, 2), skip=torch.zeros(3, dtype=torch.bool))
    with pytest.raises(StorageError, match="names of the first"):
        buffer.add(row=5)
    with pytest.raises(ConfigurationError, match="batch_size is 0"):
        buffer.sample(0)
    assert buffer[:]["row"].tolist() == [0, 1]
    with pytest.raises(ConfigurationError, match="name n_envs"):
        ReplayBuffer(10, n_steps=2).extend(transitions(0, 4))
    with pytest.raises(BatchSizeError, match="n_envs=3"):
        ReplayBuffer(10, n_envs=3).extend(transitions(0, 4))
    with pytest.raises(ConfigurationError, match=r"needs next\.reward"):
        ReplayBuffer(10, n_steps=2, n_envs=1).extend({"row": torch.zeros(2)})
    with pytest.raises(ConfigurationError, match="capacity is 0"):
        ReplayBuffer(0)
    with pytest.raises(ConfigurationError, match=r"gamma is 1\.5"):
        ReplayBuffer(5, gamma=1.5)


def test_indexing_iteration_and_repr() -> None:
    buffer = ReplayBuffer(5, seed=0)
    assert "empty" in repr(buffer)
    buffer.extend(transitions(0, 8))
    assert buffer.full
    assert buffer[0].batch_size == ()
    assert buffer[-1]["row"].item() == 7
    assert buffer[1:3]["row"].tolist() == [4, 5]
    assert buffer[torch.tensor([0, 0, 4])]["row"].tolist() == [3, 3, 7]
    assert [int(transition["row"]) for transition in buffer] == [3, 4, 5, 6, 7]
    with pytest.raises(IndexError):
        buffer[5]
    assert repr(buffer).startswith("ReplayBuffer(5/5 transitions in ram, ")
    assert "next.terminated: () bool" in repr(buffer)


def test_sequences_follow_episodes() -> None:
    buffer = ReplayBuffer(40, n_envs=2, seed=0)
    buffer.extend(transitions(0, 60))
    drawn = buffer.sequences(200, 3, lazy=False)
    assert drawn["row"].shape == (200, 3)
    for rows, mask in zip(drawn["row"].tolist(), drawn["mask"].tolist(), strict=True):
        at = rows[0]
        for row, there in zip(rows[1:], mask[1:], strict=True):
            # Rows that are 3 modulo 4 end their episodes; rows step by n_envs.
            assert there == (at % 4 != 3 and at + 2 < 60)
            if not there:
                break
            assert row == at + 2
            at = row


def test_a_save_that_is_cut_off_leaves_the_last_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffer = ReplayBuffer(10, seed=0)
    buffer.extend(transitions(0, 5))
    buffer.save(tmp_path)
    buffer.extend(transitions(5, 3))
    for fail_at in range(4):
        left = [fail_at]

        def copy(*args: Any, left: list[int] = left) -> None:
            if left[0] == 0:
                raise KeyboardInterrupt
            left[0] -= 1

        monkeypatch.setattr(persistence, "_copy", copy)
        with pytest.raises(KeyboardInterrupt):
            buffer.save(tmp_path)
        monkeypatch.undo()
        assert len(ReplayBuffer.load(tmp_path)) == 5
    buffer.save(tmp_path)
    assert ReplayBuffer.load(tmp_path)[:]["row"].tolist() == list(range(8))
    with pytest.raises(StorageError, match="not a PrioritizedReplayBuffer"):
        PrioritizedReplayBuffer.load(tmp_path)
    with pytest.raises(StorageError, match="no saved buffer"):
        ReplayBuffer.load(tmp_path / "nowhere")


def test_loaded_buffers_do_not_join_episodes(tmp_path: Path) -> None:
    buffer = ReplayBuffer(10, n_steps=3, gamma=1.0, n_envs=1)
    buffer.extend(ended(1, False, False, 1))
    buffer.save(tmp_path)
    loaded = ReplayBuffer.load(tmp_path)
    loaded.extend(ended(1, False, False, 2))
    assert loaded[:]["next", "reward"].tolist() == [1.0, 1.0]


def test_priorities_from_lazy_td_errors_after_the_optimizer_step() -> None:
    buffer = PrioritizedReplayBuffer(64, alpha=1.0, eps=0.0, seed=0)
    buffer.extend(transitions(0, 64))
    network = torch.nn.Linear(1, 1).double()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    sample = buffer.sample(20)
    error = network(sample["observation"] / 64).squeeze(-1) - sample["next", "reward"]
    loss = (sample["weight"] * error.pow(2)).mean()
    with torch.no_grad():
        expected = network((sample["index"][:, None] / 64).double()).squeeze(-1) - sample["index"]
    with koila_rl.limits(microbatch=3):
        loss.backward()
        optimizer.step()
    buffer.update_priorities(sample, error)
    priorities = buffer._tree.weights[sample["index"].numpy()]  # type: ignore[union-attr]
    np.testing.assert_allclose(priorities, expected.abs().numpy(), rtol=1e-6)
