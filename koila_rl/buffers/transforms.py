"""What is done to rows after they reach the target device.

A transform is any callable from rows ``[n, …]`` to rows ``[n, …]`` that treats each row by
itself. It should take no more memory than its input and its output, which is what the plan
counts. One that has state offers ``frozen()``: what it was when the minibatch was drawn, so
that all microbatches of one minibatch see the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

import torch
from torch import Tensor

from koila_rl.buffers.tree import Key
from koila_rl.errors import ConfigurationError

__all__ = [
    "Cast",
    "Compose",
    "RunningNormalisation",
    "Transform",
    "by_key",
    "frozen",
    "to_tensor",
    "transform_of",
]

Transform: TypeAlias = Callable[[Tensor], Tensor]


def to_tensor(rows: Tensor) -> Tensor:
    """Images as torchvision's ToTensor defines: HWC → CHW, and uint8 → float in [0, 1].

    ``[n, H, W, C]`` or ``[n, H, W]`` → ``[n, C, H, W]``. Other dtypes keep their values.
    """
    if rows.ndim not in (3, 4):
        raise ConfigurationError(
            f"to_tensor takes images [n, H, W, C] or [n, H, W], not {tuple(rows.shape)}"
        )
    images = rows[..., None] if rows.ndim == 3 else rows
    images = images.permute(0, 3, 1, 2)
    dtype = torch.get_default_dtype() if rows.dtype == torch.uint8 else rows.dtype
    # One pass, without a copy between: what is read takes its input and its output.
    made = torch.empty(images.shape, dtype=dtype, device=rows.device).copy_(images)
    return made.div_(255) if rows.dtype == torch.uint8 else made


class Cast:
    """Rows in another dtype."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def __call__(self, rows: Tensor) -> Tensor:
        """``rows`` cast."""
        return rows.to(self._dtype)


class Compose:
    """One transform after another."""

    def __init__(self, *transforms: Transform) -> None:
        self._transforms = transforms

    def __call__(self, rows: Tensor) -> Tensor:
        """``rows`` after all of them, in the order given."""
        for transform in self._transforms:
            rows = transform(rows)
        return rows

    def frozen(self) -> Compose:
        """The same with each part frozen."""
        return Compose(*(frozen(transform) for transform in self._transforms))


class RunningNormalisation:
    """``(x - mean) / sqrt(variance + eps)``, clipped, with moments of all rows seen.

    Moments are float64 and merged as Chan et al. (1979) give. Nothing is normalised before
    the first :meth:`update`.
    """

    def __init__(self, shape: tuple[int, ...], eps: float = 1e-8, clip: float = 10.0) -> None:
        self.mean = torch.zeros(shape, dtype=torch.float64)
        self.variance = torch.ones(shape, dtype=torch.float64)
        self.count = 0
        self._eps = eps
        self._clip = clip

    def update(self, rows: Tensor) -> None:
        """Take rows ``[n, *shape]`` into the moments."""
        if rows.shape[1:] != self.mean.shape or len(rows) == 0:
            raise ConfigurationError(
                f"rows are {tuple(rows.shape)}; expected [n, …] with n ≥ 1 and rows of "
                f"{tuple(self.mean.shape)}"
            )
        values = rows.detach().to("cpu", torch.float64)
        n, total = len(values), self.count + len(values)
        delta = values.mean(0) - self.mean
        squares = self.variance * self.count if self.count else torch.zeros_like(self.mean)
        squares = squares + values.var(0, correction=0) * n + delta**2 * self.count * n / total
        # New tensors, not in place: what frozen() handed out keeps its values.
        self.mean, self.variance = self.mean + delta * n / total, squares / total
        self.count = total

    def __call__(self, rows: Tensor) -> Tensor:
        """``rows`` normalised, in the default dtype unless they are floating already."""
        dtype = rows.dtype if rows.dtype.is_floating_point else torch.get_default_dtype()
        mean = self.mean.to(rows.device)
        scale = (self.variance + self._eps).sqrt().to(rows.device)
        made = torch.empty(rows.shape, dtype=dtype, device=rows.device)
        # Differences are taken in float64: a large mean must not cancel the digits.
        torch.sub(rows, mean, out=made)
        return made.div_(scale).clamp_(-self._clip, self._clip)

    def frozen(self) -> RunningNormalisation:
        """The moments as they are now."""
        copy = RunningNormalisation(tuple(self.mean.shape), self._eps, self._clip)
        copy.mean, copy.variance, copy.count = self.mean, self.variance, self.count
        return copy


def by_key(transforms: Mapping[Key | str, Transform] | None) -> dict[Key, Transform]:
    """Transforms under whole keys; refuses what is none."""
    for key, change in (transforms or {}).items():
        if not callable(change):
            raise ConfigurationError(
                f"the transform of {key!r} is {change!r}; it must be a function of rows [n, …]"
            )
    return {
        (key,) if isinstance(key, str) else tuple(key): change
        for key, change in (transforms or {}).items()
    }


def transform_of(transforms: Mapping[Key, Transform], key: Key) -> Transform | None:
    """What is done to leaf ``key``, frozen: named for it, or for what holds it.

    What is named for ``observation`` holds for ``("next", "observation")`` too.
    """
    if not transforms:
        return None
    for wanted in (key, key[1:] if key[0] == "next" else key):
        for depth in range(len(wanted), 0, -1):
            if (found := transforms.get(wanted[:depth])) is not None:
                return frozen(found)
    return None


def frozen(transform: Transform) -> Transform:
    """The transform as it is now."""
    freeze = getattr(transform, "frozen", None)
    return freeze() if callable(freeze) else transform
