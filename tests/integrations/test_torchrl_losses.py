"""TorchRL's loss modules and GAE on lazy TensorDicts: values and gradients as on real ones."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import NormalParamExtractor, TensorDictModule
from torch import Tensor, nn
from torchrl.data import Bounded, OneHot
from torchrl.modules import (
    MLP,
    DistributionalQValueActor,
    ProbabilisticActor,
    QValueActor,
    TanhNormal,
    ValueOperator,
)
from torchrl.objectives import (
    A2CLoss,
    ClipPPOLoss,
    CQLLoss,
    DDPGLoss,
    DistributionalDQNLoss,
    DQNLoss,
    IQLLoss,
    KLPENPPOLoss,
    REDQLoss,
    ReinforceLoss,
    SACLoss,
    TD3Loss,
)
from torchrl.objectives.value import GAE

import koila_rl
from tests.helpers import allow_unsplit, double_precision

N, OBSERVATION, ACTION = 11, 4, 2

pytestmark = pytest.mark.filterwarnings("ignore:No target network updater has been associated")


def policy() -> Any:
    network = nn.Sequential(MLP(OBSERVATION, 2 * ACTION, num_cells=[8]), NormalParamExtractor())
    module = TensorDictModule(network, in_keys=["observation"], out_keys=["loc", "scale"])
    return ProbabilisticActor(
        module, in_keys=["loc", "scale"], distribution_class=TanhNormal, return_log_prob=True,
        spec=Bounded(-1.0, 1.0, (ACTION,)),
    )  # fmt: skip


def deterministic() -> Any:
    return TensorDictModule(
        nn.Sequential(MLP(OBSERVATION, ACTION, num_cells=[8]), nn.Tanh()),
        in_keys=["observation"], out_keys=["action"],
    )  # fmt: skip


def value() -> Any:
    return ValueOperator(MLP(OBSERVATION, 1, num_cells=[8]), in_keys=["observation"])


def action_value() -> Any:
    network = MLP(OBSERVATION + ACTION, 1, num_cells=[8])
    return ValueOperator(network, in_keys=["observation", "action"])


def q_actor() -> Any:
    return QValueActor(MLP(OBSERVATION, 3, num_cells=[8]), spec=OneHot(3), action_space="one-hot")


def distributional_actor() -> Any:
    network = nn.Sequential(MLP(OBSERVATION, (5, 3), num_cells=[8]), nn.LogSoftmax(-2))
    return DistributionalQValueActor(
        network, support=torch.linspace(-3, 3, 5), spec=OneHot(3), action_space="one-hot"
    )


LOSSES: dict[str, Callable[[], Any]] = {
    "clip_ppo": lambda: ClipPPOLoss(policy(), value(), normalize_advantage=True),
    "kl_ppo": lambda: KLPENPPOLoss(policy(), value()),
    "a2c": lambda: A2CLoss(policy(), value()),
    "reinforce": lambda: ReinforceLoss(policy(), value()),
    "dqn": lambda: DQNLoss(q_actor(), delay_value=True, action_space="one-hot"),
    "distributional_dqn": lambda: DistributionalDQNLoss(
        distributional_actor(), gamma=0.9, delay_value=True
    ),
    "sac": lambda: SACLoss(policy(), action_value(), num_qvalue_nets=2),
    "td3": lambda: TD3Loss(
        deterministic(), action_value(), bounds=(-1.0, 1.0), policy_noise=0.2, noise_clip=0.1
    ),
    "ddpg": lambda: DDPGLoss(deterministic(), action_value(), delay_value=True),
    "redq": lambda: REDQLoss(policy(), action_value(), num_qvalue_nets=4, sub_sample_len=2),
    "cql": lambda: CQLLoss(
        policy(), action_value(), action_spec=Bounded(-1.0, 1.0, (ACTION,)), num_random=3
    ),
    "iql": lambda: IQLLoss(policy(), action_value(), value_network=value()),
}
DISCRETE = ("dqn", "distributional_dqn")
ON_POLICY = ("clip_ppo", "kl_ppo", "a2c", "reinforce")


def transitions(name: str, actor: Any) -> TensorDict:
    generator = torch.Generator().manual_seed(3)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    following = TensorDict(
        {
            "observation": normal(N, OBSERVATION),
            "reward": normal(N, 1),
            "terminated": torch.rand(N, 1, generator=generator) < 0.3,
        },
        [N],
    )
    following["done"] = following["terminated"].clone()
    data = TensorDict({"observation": normal(N, OBSERVATION), "next": following}, [N])
    if name in DISCRETE:
        index = torch.randint(0, 3, (N,), generator=generator)
        data["action"] = nn.functional.one_hot(index, 3)
    elif name in ON_POLICY:
        with torch.no_grad():
            actor(data)
        data["advantage"], data["value_target"] = normal(N, 1), normal(N, 1)
        data["state_value"] = normal(N, 1)
    else:
        data["action"] = normal(N, ACTION).tanh() * 0.9
    return data.double() if data["observation"].dtype != torch.float64 else data


def outcome(module: Any, data: TensorDict) -> tuple[dict[str, Tensor], list[Any]]:
    module = copy.deepcopy(module)
    torch.manual_seed(5)
    losses = module(data)
    parts = [losses[key] for key in losses.keys() if key.startswith("loss")]  # noqa: SIM118
    sum(parts).backward()
    values = {key: koila_rl.materialize(losses[key]).detach() for key in losses.keys()}  # noqa: SIM118
    return values, [p.grad for p in module.parameters()]


WHOLE = [
    pytest.param(name, None, marks=() if name in ("clip_ppo", "cql") else pytest.mark.slow)
    for name in LOSSES
]


@pytest.mark.parametrize(("name", "microbatch"), [*((name, 3) for name in LOSSES), *WHOLE])
def test_losses(name: str, microbatch: int | None) -> None:
    with double_precision(), allow_unsplit():
        torch.manual_seed(0)
        module = LOSSES[name]()
        data = transitions(name, getattr(module, "actor_network", None))
        expected, wanted = outcome(module, data.clone())
        with koila_rl.limits(microbatch=microbatch):
            got, gradients = outcome(module, koila_rl.lazy(data.clone()))
    plan = koila_rl.last_plan()
    assert plan is not None
    assert plan.split == (microbatch is not None)
    for key, value in expected.items():
        torch.testing.assert_close(got[key], value.detach(), rtol=1e-9, atol=1e-9, msg=key)
    for mine, theirs in zip(gradients, wanted, strict=True):
        assert (mine is None) == (theirs is None)
        if mine is not None:
            torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("microbatch", [None, 3], ids=["whole", "split"])
@pytest.mark.parametrize("shape", [(N,), (N, 5)], ids=["steps", "trajectories"])
def test_gae(shape: tuple[int, ...], microbatch: int | None) -> None:
    with double_precision(), allow_unsplit():
        torch.manual_seed(0)
        estimator = GAE(gamma=0.9, lmbda=0.8, value_network=value(), average_gae=True)
        following = TensorDict(
            {
                "observation": torch.randn(*shape, OBSERVATION),
                "reward": torch.randn(*shape, 1),
                "terminated": torch.rand(*shape, 1) < 0.2,
            },
            shape,
        )
        following["done"] = following["terminated"].clone()
        data = TensorDict({"observation": torch.randn(*shape, OBSERVATION)}, shape)
        data["next"] = following
        expected = estimator(data.clone())
        with koila_rl.limits(microbatch=microbatch):
            got = estimator(koila_rl.lazy(data.clone()))
            for key in ("advantage", "value_target", "state_value"):
                mine = koila_rl.materialize(got[key])
                torch.testing.assert_close(mine, expected[key], rtol=1e-9, atol=1e-9, msg=key)
