"""The Atari path from end to end, within a memory limit."""

from __future__ import annotations

from pathlib import Path

import pytest

import koila_rl
from koila_rl.agents import DQN


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_dqn_on_pong_within_256_mib(tmp_path: Path) -> None:
    pytest.importorskip("ale_py")
    result = koila_rl.train(
        "ALE/Pong-v5",
        agent="dqn",
        total_timesteps=20_000,
        memory="256MiB",
        # The preset's first update would come after the run.
        learning_starts=2_000,
        run_dir=tmp_path / "pong",
        progress=False,
    )
    agent = result.agent
    assert isinstance(agent, DQN)
    assert agent.n_updates >= 4_000
    assert result.plan is not None
    assert result.plan.peak_bytes <= 256 * 2**20
    replay = agent.replay
    assert replay is not None
    # Stacks of four bytes a pixel, of which each frame is stored once.
    frame, stacks = 84 * 84, len(replay)
    assert replay.sample(2)["observation"].shape == (2, 4, 84, 84)
    assert replay.nbytes < 1.1 * (replay.capacity * frame + 40 * replay.capacity)
    assert stacks >= 20_000
    assert (tmp_path / "pong" / "learning_curve.png").exists()
