"""TorchRL's loss modules with the options of its own tests, on lazy TensorDicts against real ones.

Beside those of the quick tests: discrete and batch-constrained variants, value estimators, and
minibatches from wrapped buffers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torchrl.data import LazyTensorStorage, OneHot, TensorDictReplayBuffer
from torchrl.modules import MLP, OneHotCategorical, ProbabilisticActor, ValueOperator
from torchrl.objectives import (
    A2CLoss,
    ClipPPOLoss,
    DDPGLoss,
    DiscreteCQLLoss,
    DiscreteSACLoss,
    DQNLoss,
    IQLLoss,
    KLPENPPOLoss,
    PPOLoss,
    REDQLoss,
    ReinforceLoss,
    SACLoss,
    TD3BCLoss,
    TD3Loss,
    ValueEstimators,
)
from torchrl.objectives.value import TD0Estimator, TD1Estimator, TDLambdaEstimator

import koila_rl
from tests.helpers import allow_unsplit, double_precision
from tests.integrations.test_torchrl_losses import (
    OBSERVATION,
    N,
    action_value,
    deterministic,
    outcome,
    policy,
    q_actor,
    transitions,
    value,
)

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


def discrete_policy() -> Any:
    module = TensorDictModule(
        MLP(OBSERVATION, 3, num_cells=[8]), in_keys=["observation"], out_keys=["logits"]
    )
    return ProbabilisticActor(
        module, in_keys=["logits"], distribution_class=OneHotCategorical, return_log_prob=True,
        spec=OneHot(3),
    )  # fmt: skip


def discrete_values() -> Any:
    return ValueOperator(
        MLP(OBSERVATION, 3, num_cells=[8]), in_keys=["observation"], out_keys=["action_value"]
    )


def estimated(loss: Any, kind: ValueEstimators) -> Any:
    loss.make_value_estimator(kind, gamma=0.9)
    return loss


# The data of ``transitions`` that each needs: "clip_ppo" draws actions, "dqn" discrete ones.
MODULES: dict[str, tuple[str, Callable[[], Any]]] = {
    "ppo": ("clip_ppo", lambda: PPOLoss(policy(), value())),
    "ppo without entropy": (
        "clip_ppo", lambda: ClipPPOLoss(policy(), value(), entropy_bonus=False)),
    "ppo clipped values": ("clip_ppo", lambda: ClipPPOLoss(policy(), value(), clip_value=0.2)),
    "ppo smooth values": (
        "clip_ppo", lambda: ClipPPOLoss(policy(), value(), loss_critic_type="smooth_l1")),
    "ppo separate losses": (
        "clip_ppo", lambda: ClipPPOLoss(policy(), value(), separate_losses=True)),
    "kl ppo strict": ("kl_ppo", lambda: KLPENPPOLoss(policy(), value(), dtarg=0.1, beta=0.5)),
    "a2c smooth": ("a2c", lambda: A2CLoss(policy(), value(), loss_critic_type="l2")),
    "reinforce delayed": ("reinforce", lambda: ReinforceLoss(policy(), value(), delay_value=True)),
    "dqn double": ("dqn", lambda: DQNLoss(q_actor(), double_dqn=True, delay_value=True,
                                          action_space="one-hot")),
    "dqn smooth": ("dqn", lambda: DQNLoss(q_actor(), loss_function="smooth_l1",
                                          delay_value=False, action_space="one-hot")),
    "dqn td1": ("dqn", lambda: estimated(
        DQNLoss(q_actor(), delay_value=True, action_space="one-hot"), ValueEstimators.TD1)),
    "sac fixed temperature": (
        "sac", lambda: SACLoss(policy(), action_value(), fixed_alpha=True, num_qvalue_nets=3)),
    "discrete sac": ("dqn", lambda: DiscreteSACLoss(
        discrete_policy(), discrete_values(), action_space="one-hot", num_actions=3)),
    "discrete cql": ("dqn", lambda: DiscreteCQLLoss(q_actor(), action_space="one-hot")),
    "iql expectile": ("iql", lambda: IQLLoss(policy(), action_value(), value_network=value(),
                                             expectile=0.8, temperature=3.0)),
    "td3 ensemble": ("td3", lambda: TD3Loss(
        deterministic(), action_value(), bounds=(-1.0, 1.0), num_qvalue_nets=4)),
    "td3 behaviour cloning": ("td3", lambda: TD3BCLoss(
        deterministic(), action_value(), bounds=(-1.0, 1.0))),
    "ddpg both delayed": ("ddpg", lambda: DDPGLoss(
        deterministic(), action_value(), delay_actor=True, delay_value=True)),
    "redq ensemble": ("redq", lambda: REDQLoss(
        policy(), action_value(), num_qvalue_nets=6, sub_sample_len=3, gSDE=False)),
}  # fmt: skip


def held(module: Any, data: TensorDict, lazy: Callable[[], Any], microbatch: int | None) -> None:
    expected, wanted = outcome(module, data.clone())
    with koila_rl.limits(microbatch=microbatch):
        got, gradients = outcome(module, lazy())
    for key, known in expected.items():
        torch.testing.assert_close(got[key], known, rtol=1e-9, atol=1e-9, msg=key)
    for mine, theirs in zip(gradients, wanted, strict=True):
        assert (mine is None) == (theirs is None)
        if mine is not None:
            torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("microbatch", [None, 1, 3], ids=["whole", "one by one", "split"])
@pytest.mark.parametrize("name", list(MODULES))
def test_loss_modules(name: str, microbatch: int | None) -> None:
    kind, make = MODULES[name]
    with double_precision(), allow_unsplit():
        torch.manual_seed(0)
        module = make()
        data = transitions(kind, getattr(module, "actor_network", None))
        held(module, data, lambda: koila_rl.lazy(data.clone()), microbatch)


@pytest.mark.parametrize("name", ["ppo", "dqn double", "sac fixed temperature", "td3 ensemble"])
def test_minibatches_of_a_wrapped_buffer(name: str) -> None:
    kind, make = MODULES[name]
    with double_precision(), allow_unsplit():
        torch.manual_seed(0)
        module = make()
        buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(N), batch_size=7)
        buffer.extend(transitions(kind, getattr(module, "actor_network", None)))

        def drawn(source: Any) -> Any:
            torch.manual_seed(4)
            return source.sample()

        held(module, drawn(buffer), lambda: drawn(koila_rl.wrap(buffer)), 3)


ESTIMATORS = {
    "td0": lambda: TD0Estimator(gamma=0.9, value_network=value()),
    "td1": lambda: TD1Estimator(gamma=0.9, value_network=value()),
    "td lambda": lambda: TDLambdaEstimator(gamma=0.9, lmbda=0.8, value_network=value()),
}


@pytest.mark.parametrize("microbatch", [None, 3])
@pytest.mark.parametrize("name", list(ESTIMATORS))
def test_value_estimators(name: str, microbatch: int | None) -> None:
    with double_precision(), allow_unsplit():
        torch.manual_seed(0)
        estimator = ESTIMATORS[name]()
        shape = (N, 5)
        over = torch.rand(*shape, 1) < 0.2
        following = {
            "observation": torch.randn(*shape, OBSERVATION), "reward": torch.randn(*shape, 1),
            "terminated": over, "done": over.clone(),
        }  # fmt: skip
        data = TensorDict(
            {"observation": torch.randn(*shape, OBSERVATION), "next": following}, shape
        )
        expected = estimator(data.clone())
        with koila_rl.limits(microbatch=microbatch):
            got = estimator(koila_rl.lazy(data.clone()))
            for key in ("advantage", "value_target"):
                mine = koila_rl.materialize(got[key])
                torch.testing.assert_close(mine, expected[key], rtol=1e-9, atol=1e-9, msg=key)
