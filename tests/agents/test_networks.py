"""Shapes, initial weights and distributions of the networks."""

from __future__ import annotations

import math

import gymnasium as gym
import numpy as np
import pytest
import torch

from koila_rl.agents.networks import ActorCritic
from koila_rl.errors import UnsupportedError
from koila_rl.spaces import ActionSpace, ObservationSpace, is_image

Box, Discrete = gym.spaces.Box, gym.spaces.Discrete
VECTOR = Box(-1.0, 1.0, (3,), np.float32)


def picture(*shape: int) -> Box:
    return Box(0, 255, shape, np.uint8)


def network(observation: ObservationSpace, action: ActionSpace, share: bool = False) -> ActorCritic:
    torch.manual_seed(0)
    arch = () if is_image(observation) else (8, 8)
    return ActorCritic(observation, action, net_arch=arch, share_trunk=share)


@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize(
    "observation",
    [
        VECTOR,
        Box(0.0, 1.0, (2, 3)),
        Box(0.0, 1.0, ()),
        Discrete(4, start=2),
        picture(4, 36, 36),
        picture(36, 40, 3),
    ],
)
@pytest.mark.parametrize("action", [Discrete(3), Box(-1.0, 1.0, (2,)), Box(-1.0, 1.0, (2, 2))])
def test_shapes(observation: ObservationSpace, action: ActionSpace, share: bool) -> None:
    net = network(observation, action, share)
    sample = torch.from_numpy(np.stack([np.asarray(observation.sample()) for _ in range(5)]))
    distribution, value = net(sample)
    assert value.shape == (5,)
    actions = distribution.sample(torch.Generator())
    flat = (math.prod(action.shape),) if action.shape else ()
    assert actions.shape == (5, *flat)
    assert distribution.log_prob(actions).shape == (5,)
    assert distribution.entropy().shape == (5,)
    torch.testing.assert_close(net.value(sample), value)
    torch.testing.assert_close(
        net.distribution(sample).log_prob(actions), distribution.log_prob(actions)
    )


def test_a_shared_trunk_is_one_and_apart_are_two() -> None:
    shared = network(VECTOR, Discrete(2), share=True)
    assert shared.value_trunk is shared.policy_trunk
    apart = network(VECTOR, Discrete(2))
    apart.distribution(torch.zeros(2, 3)).log_prob(torch.tensor([0, 1])).sum().backward()
    assert all(p.grad is None for p in apart.value_trunk.parameters())
    assert all(p.grad is not None for p in apart.policy_trunk.parameters())


def test_first_policy_is_nearly_uniform_and_weights_are_orthogonal() -> None:
    net = network(VECTOR, Discrete(4))
    probs = net.distribution(torch.randn(50, 3)).probs  # type: ignore[attr-defined]
    assert float((probs.detach() - 0.25).abs().max()) < 0.01
    first = next(m for m in net.policy_trunk.modules() if isinstance(m, torch.nn.Linear))
    gram = first.weight.T @ first.weight
    torch.testing.assert_close(gram, 2.0 * torch.eye(3), rtol=0, atol=1e-5)
    assert float(first.bias.detach().abs().max()) == 0.0


def test_gaussian_log_probability_by_hand() -> None:
    net = network(VECTOR, Box(-1.0, 1.0, (2,)))
    with torch.no_grad():
        net.policy_head.log_std.copy_(torch.tensor([0.5, -0.5]))  # type: ignore[union-attr, operator]
    distribution = net.distribution(torch.zeros(1, 3))
    action = distribution.mean + torch.tensor([1.0, 2.0])
    by_hand = sum(
        -0.5 * (d / math.exp(s)) ** 2 - s - 0.5 * math.log(2 * math.pi)
        for d, s in ((1.0, 0.5), (2.0, -0.5))
    )
    assert float(distribution.log_prob(action).detach()) == pytest.approx(by_hand, rel=1e-5)


def test_channels_last_and_first_see_the_same_picture() -> None:
    torch.manual_seed(0)
    first = network(picture(3, 36, 40), Discrete(2))
    last = network(picture(36, 40, 3), Discrete(2))
    last.load_state_dict(first.state_dict())
    image = torch.randint(0, 256, (2, 3, 36, 40), dtype=torch.uint8)
    torch.testing.assert_close(first.value(image), last.value(image.permute(0, 2, 3, 1)))


def test_pictures_are_scaled_to_one() -> None:
    net = network(picture(3, 36, 36), Discrete(2))
    seen = []
    first = next(m for m in net.value_trunk.modules() if isinstance(m, torch.nn.Conv2d))
    first.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    net.value(torch.full((1, 3, 36, 36), 255, dtype=torch.uint8))
    assert float(seen[0].max()) == 1.0


def test_what_is_a_picture() -> None:
    assert is_image(picture(4, 84, 84))
    assert not is_image(Box(0, 100, (4, 84, 84), np.uint8))
    assert not is_image(Box(0.0, 255.0, (4, 84, 84)))
    assert not is_image(picture(84, 84))


def test_small_pictures_are_refused_with_a_remedy() -> None:
    with pytest.raises(UnsupportedError, match=r"20×20 are too small.*FlattenObservation"):
        network(picture(3, 20, 20), Discrete(2))
