"""skrl's agents with one line more: the same parameters."""

from __future__ import annotations

import copy
from typing import Any

import gymnasium as gym
import pytest
import torch
from torch import Tensor, nn

import koila_rl
from koila_rl.errors import ConfigurationError, UnsupportedError

skrl = pytest.importorskip("skrl")

from skrl.agents.torch.cem import CEM, CEM_CFG  # noqa: E402
from skrl.agents.torch.ddqn import DDQN, DDQN_CFG  # noqa: E402
from skrl.agents.torch.dqn import DQN, DQN_CFG  # noqa: E402
from skrl.agents.torch.ppo import PPO, PPO_CFG  # noqa: E402
from skrl.envs.wrappers.torch import wrap_env  # noqa: E402
from skrl.memories.torch import RandomMemory  # noqa: E402
from skrl.models.torch import CategoricalMixin, DeterministicMixin, Model  # noqa: E402
from skrl.trainers.torch import SequentialTrainer  # noqa: E402
from skrl.utils import set_seed  # noqa: E402

from koila_rl.integrations import skrl as ours  # noqa: E402


class _Network:
    def build(self, outputs: int) -> None:
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, outputs))

    def compute(self, inputs: Any, role: str) -> Any:
        return self.net(inputs["observations"]), {}


class Policy(_Network, CategoricalMixin, Model):  # type: ignore[misc]
    def __init__(self, spaces: dict[str, Any]) -> None:
        Model.__init__(self, **spaces)
        CategoricalMixin.__init__(self)
        self.build(2)


class Value(_Network, DeterministicMixin, Model):  # type: ignore[misc]
    def __init__(self, spaces: dict[str, Any], outputs: int = 1) -> None:
        Model.__init__(self, **spaces)
        DeterministicMixin.__init__(self)
        self.build(outputs)


def agent(kind: Any) -> tuple[Any, Any]:
    """A tiny agent on two CartPoles, and its environment."""
    skrl.logger.setLevel("ERROR")
    set_seed(0)
    vector = gym.make_vec("CartPole-v1", 2, vectorization_mode="sync")
    env = wrap_env(vector)
    vector.reset(seed=0)
    spaces = {
        "observation_space": env.observation_space,
        "action_space": env.action_space,
        "device": "cpu",
    }
    if kind is PPO:
        cfg: Any = PPO_CFG(rollouts=8, learning_epochs=2, mini_batches=2)
        models: Any = {"policy": Policy(spaces), "value": Value(spaces)}
        size = 8
    elif kind is CEM:
        cfg, models, size = CEM_CFG(), {"policy": Policy(spaces)}, 8
    else:
        config = DQN_CFG if kind is DQN else DDQN_CFG
        cfg = config(batch_size=8, learning_starts=4, random_timesteps=4)
        models = {name: Value(spaces, 2) for name in ("q_network", "target_q_network")}
        size = 50
    cfg.experiment.write_interval = cfg.experiment.checkpoint_interval = 0
    memory = RandomMemory(memory_size=size, num_envs=2, device="cpu")
    return kind(models=models, memory=memory, cfg=cfg, **spaces), env


def learned(kind: Any, attach: bool, microbatch: int | None = None) -> Tensor:
    made, env = agent(kind)
    if attach:
        ours.attach(made, microbatch=microbatch)
    options = {"timesteps": 24, "headless": True, "disable_progressbar": True}
    SequentialTrainer(
        cfg={**options, "close_environment_at_exit": False}, env=env, agents=made
    ).train()
    return torch.cat([p.detach().flatten() for m in made.models.values() for p in m.parameters()])


@pytest.mark.parametrize("kind", [PPO, DQN, pytest.param(DDQN, marks=pytest.mark.slow)])
def test_training_gives_the_same_parameters(kind: Any) -> None:
    plain = learned(kind, attach=False)
    for microbatch in (None, 3):
        torch.testing.assert_close(learned(kind, True, microbatch), plain, rtol=0, atol=1e-5)
    plan = koila_rl.last_plan()
    assert plan is not None
    assert (plan.batch_size, plan.microbatch_size) == (8, 3)
    assert plan.unsplit == ()


def test_attach_and_detach() -> None:
    made, _ = agent(PPO)
    memory = made.memory
    assert ours.attach(ours.attach(made)) is made
    assert made.memory is memory
    assert isinstance(copy.copy(made), PPO)
    assert type(ours.detach(ours.detach(made))) is PPO


def test_wrong_use_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    made, _ = agent(CEM)
    with pytest.raises(UnsupportedError, match=r"CEM of skrl is not supported.*PPO, "):
        ours.attach(made)
    with pytest.raises(ConfigurationError, match="got int"):
        ours.attach(3)
    monkeypatch.setattr(ours, "TESTED", ("0.1", "0.2"))
    made, _ = agent(PPO)
    with pytest.warns(UserWarning, match=r"skrl 2\..* is installed"):
        ours.attach(made)
