"""Encoders: from an observation in the environment's own shape and dtype to float features."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor, nn

from koila_rl.errors import UnsupportedError
from koila_rl.spaces import is_image, parts

__all__ = [
    "CNNS",
    "ImpalaCNN",
    "NatureCNN",
    "channels_last",
    "encoder",
    "has_images",
    "orthogonal",
]


def orthogonal(layer: nn.Module, gain: float = math.sqrt(2)) -> nn.Module:
    """The layer with orthogonal weights of the given gain, and biases of zero."""
    assert isinstance(layer, (nn.Linear, nn.Conv2d))
    nn.init.orthogonal_(layer.weight, gain)
    assert layer.bias is not None
    nn.init.zeros_(layer.bias)
    return layer


def _is_last(shape: tuple[int, ...]) -> bool:
    """Whether the channels of an image are its last axis: the smaller of the first and the last."""
    return shape[-1] < shape[0]


class _Images(nn.Module):
    """Images ``[N, *shape]`` as float ``[N, channels, height, width]`` from 0 to 1.

    uint8 images are divided by 255 here, so that they travel as bytes.
    """

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.last = _is_last(shape)
        self.channels, *size = (shape[-1], *shape[:-1]) if self.last else shape
        self.size = tuple(size)

    def forward(self, observation: Tensor) -> Tensor:
        image = observation.permute(0, 3, 1, 2) if self.last else observation
        return image.float() / 255.0


class NatureCNN(nn.Module):
    """The convolutional encoder of Mnih et al. 2015, 512 features; images ``[N, *shape]``."""

    width = 512

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.images = _Images(shape)
        height, width = self.images.size
        if min(height, width) < 36:
            raise UnsupportedError(
                f"images of {height}×{width} are too small for the Nature CNN, which needs 36×36; "
                "use features_extractor='impala' or gymnasium.wrappers.FlattenObservation"
            )
        self.convolutions = nn.Sequential(
            *(orthogonal(nn.Conv2d(self.images.channels, 32, 8, stride=4)), nn.ReLU()),
            *(orthogonal(nn.Conv2d(32, 64, 4, stride=2)), nn.ReLU()),
            *(orthogonal(nn.Conv2d(64, 64, 3, stride=1)), nn.ReLU()),
            nn.Flatten(),
        )
        with torch.no_grad():
            flat = self.convolutions(torch.zeros(1, self.images.channels, height, width)).shape[1]
        self.linear = nn.Sequential(orthogonal(nn.Linear(flat, self.width)), nn.ReLU())

    def forward(self, observation: Tensor) -> Tensor:
        """Features ``[N, 512]``."""
        features: Tensor = self.linear(self.convolutions(self.images(observation)))
        return features


class _Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1)
        self.second = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        change: Tensor = self.second(torch.relu(self.first(torch.relu(x))))
        return x + change


class ImpalaCNN(nn.Module):
    """The residual encoder of Espeholt et al. 2018, 256 features; images ``[N, *shape]``.

    Three sections of a convolution, a pooling that halves the image, and two residual blocks
    (https://arxiv.org/abs/1802.01561, figure 3, the large architecture without its LSTM).
    """

    width = 256

    def __init__(self, shape: tuple[int, ...], channels: tuple[int, ...] = (16, 32, 32)) -> None:
        super().__init__()
        self.images = _Images(shape)
        sections: list[nn.Module] = []
        before, (height, width) = self.images.channels, self.images.size
        for after in channels:
            sections += [
                nn.Conv2d(before, after, 3, padding=1),
                nn.MaxPool2d(3, stride=2, padding=1),
                *(_Residual(after), _Residual(after)),
            ]
            before, height, width = after, (height + 1) // 2, (width + 1) // 2
        self.convolutions = nn.Sequential(*sections, nn.ReLU(), nn.Flatten())
        flat = before * height * width
        self.linear = nn.Sequential(orthogonal(nn.Linear(flat, self.width)), nn.ReLU())

    def forward(self, observation: Tensor) -> Tensor:
        """Features ``[N, 256]``."""
        features: Tensor = self.linear(self.convolutions(self.images(observation)))
        return features


CNNS: dict[str, type[NatureCNN] | type[ImpalaCNN]] = {"nature": NatureCNN, "impala": ImpalaCNN}


class _Flat(nn.Module):
    """A number, vector or array of numbers as float features."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.single = not shape

    def forward(self, observation: Tensor) -> Tensor:
        features = observation.float()
        return features.unsqueeze(1) if self.single else features.flatten(1)


class _OneHot(nn.Module):
    """Numbers ``[N, …]``, each one of ``n`` counted from ``start``, as unit vectors in a row."""

    def __init__(self, n: Any, start: Any) -> None:
        super().__init__()
        sizes = np.atleast_1d(n).reshape(-1).tolist()
        starts = np.broadcast_to(np.reshape(start, -1), len(sizes)).tolist()
        self.starts: list[int] = starts
        self.width: int = sum(sizes)
        for i, size in enumerate(sizes):
            self.register_buffer(f"identity{i}", torch.eye(size), persistent=False)

    def forward(self, observation: Tensor) -> Tensor:
        numbers = observation.long().reshape(observation.shape[0], -1)
        return torch.cat(
            [
                getattr(self, f"identity{i}")[numbers[:, i] - start]
                for i, start in enumerate(self.starts)
            ],
            dim=1,
        )


class _Combined(nn.Module):
    """The features of the parts of a Dict or Tuple observation, side by side."""

    def __init__(self, encoders: dict[str, nn.Module]) -> None:
        super().__init__()
        # Names of the user's own may be such that a ModuleDict refuses.
        self.names = tuple(encoders)
        self.encoders = nn.ModuleList(encoders.values())

    def forward(self, observation: Mapping[str, Tensor]) -> Tensor:
        features = [
            part(observation[name]) for name, part in zip(self.names, self.encoders, strict=True)
        ]
        return torch.cat(features, dim=1)


def encoder(space: gym.Space[Any], cnn: str = "nature") -> tuple[nn.Module, int]:
    """A module from observations ``[N, …]`` to features ``[N, width]``, and the width.

    ``cnn`` is what images go through, ``"nature"`` or ``"impala"``.
    """
    if isinstance(space, (gym.spaces.Dict, gym.spaces.Tuple)):
        encoders = {name: encoder(part, cnn) for name, part in parts(space).items()}
        combined = _Combined({name: module for name, (module, _) in encoders.items()})
        return combined, sum(width for _, width in encoders.values())
    if isinstance(space, gym.spaces.Discrete):
        return _OneHot(space.n, space.start), int(space.n)
    if isinstance(space, gym.spaces.MultiDiscrete):
        one_hot = _OneHot(space.nvec, space.start)
        return one_hot, one_hot.width
    assert space.shape is not None
    if is_image(space):
        return CNNS[cnn](space.shape), CNNS[cnn].width
    return _Flat(space.shape), math.prod(space.shape)


def has_images(space: gym.Space[Any]) -> bool:
    """Whether any part of an observation goes through a convolutional encoder."""
    if isinstance(space, (gym.spaces.Dict, gym.spaces.Tuple)):
        return any(has_images(part) for part in parts(space).values())
    return is_image(space)


def channels_last(space: gym.Space[Any]) -> bool:
    """Whether the images of an observation hold their channels in the last axis."""
    if isinstance(space, (gym.spaces.Dict, gym.spaces.Tuple)):
        return any(channels_last(part) for part in parts(space).values())
    return is_image(space) and _is_last(space.shape or ())
