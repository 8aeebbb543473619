"""What an update would take on a card that is not here."""

from __future__ import annotations

import pytest

from koila_rl.agents.dqn import DQN
from koila_rl.agents.ppo import PPO
from koila_rl.agents.recurrent_ppo import RecurrentPPO
from koila_rl.cards import plan_on_card
from koila_rl.cli import main
from koila_rl.errors import ConfigurationError, InsufficientMemoryError, UnsupportedError
from koila_rl.memory.cuda import CONTEXT_BYTES, DIFFERENCES, differences_in

MIB = 1 << 20


@pytest.mark.parametrize("agent", [PPO, DQN])
def test_the_parts_add_up_and_the_update_fits(agent: type[PPO] | type[DQN]) -> None:
    found = plan_on_card("CartPole-v1", agent, 65536, CONTEXT_BYTES + 24 * MIB)
    assert found.plan.split
    assert found.total_bytes <= found.card_bytes
    assert found.total_bytes == (
        found.parameters_bytes + found.optimizer_bytes + found.context_bytes
        + found.plan.peak_bytes
    )  # fmt: skip
    learner = agent("CartPole-v1", device="cpu")
    parameters = sum(p.nbytes for p in learner.network.parameters())
    assert found.optimizer_bytes >= 2 * parameters
    assert learner.env is not None
    learner.env.close()
    assert [size for size, _ in found.rows] == [4096, 16384, 65536, 262144]
    assert found.rows[2][1] is found.plan
    whole = found.rows[0][1]
    assert whole is not None
    assert not whole.split
    text = str(found)
    for part in ("parameters", "optimizer", "CUDA context (assumed)", "65,536", "cuBLAS"):
        assert part in text


def test_more_samples_take_more_and_the_cpu_has_no_context() -> None:
    found = plan_on_card("CartPole-v1", PPO, 256, "1GiB", "cpu")
    assert found.context_bytes == 0
    assert found.differences == ()
    peaks = [plan.peak_bytes for _, plan in found.rows if plan is not None]
    assert peaks == sorted(set(peaks))


def test_what_cannot_be_planned_is_said() -> None:
    with pytest.raises(InsufficientMemoryError, match="nothing is left for an update"):
        plan_on_card("CartPole-v1", PPO, 256, "100MiB")
    with pytest.raises(ConfigurationError, match="device is 'tpu'"):
        plan_on_card("CartPole-v1", PPO, 256, "1GiB", "tpu")
    with pytest.raises(ConfigurationError, match="'lots' is not a size"):
        plan_on_card("CartPole-v1", PPO, 256, "lots")
    with pytest.raises(ConfigurationError, match="batch_size is 1"):
        plan_on_card("CartPole-v1", PPO, 1, "1GiB")
    with pytest.raises(UnsupportedError, match="RecurrentPPO yet"):
        plan_on_card("CartPole-v1", RecurrentPPO, 256, "1GiB")


def test_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", "CartPole-v1", "--agent", "ppo", "--batch-size", "65536", "--card", "8GiB"]
    assert main([*arguments, "--device", "cuda"]) == 0
    assert "cuda of 8 GiB, in all" in capsys.readouterr().out
    assert main(["plan", "CartPole-v1", "--agent", "ppp"]) == 2
    assert "did you mean ppo?" in capsys.readouterr().err


def test_every_difference_is_told_by_its_operators() -> None:
    for item in DIFFERENCES:
        assert item in differences_in(item.operators)
    assert differences_in(["tanh", "add"]) == ()
