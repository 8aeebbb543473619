"""Prioritised replay (Schaul et al. 2016, https://arxiv.org/abs/1511.05952), proportional."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from koila_rl.buffers.checks import number, whole
from koila_rl.buffers.columns import TransitionColumns
from koila_rl.buffers.replay import ReplayBuffer
from koila_rl.buffers.samplers import Sampler
from koila_rl.buffers.storage import Index, Storage
from koila_rl.buffers.sumtree import SumTree
from koila_rl.errors import BatchSizeError, ConfigurationError, StorageError

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["PrioritizedReplayBuffer"]


class PrioritizedReplayBuffer(ReplayBuffer):
    """Draws transition i with probability ``p_i ** alpha / Σ p ** alpha``.

    As the paper draws: one from each of ``batch_size`` equal shares of the sum, so that a minibatch
    comes in the order of the ring.

    Minibatches carry ``index`` (which transitions they are, int64 ``[B]``) and ``weight``
    (importance weights ``(n · P(i)) ** -beta``, float32 ``[B]``, divided by the largest of the
    whole minibatch). New transitions get the largest priority seen. Arguments are those of
    :class:`ReplayBuffer`, and:

    Args:
        alpha: 0 draws uniformly, 1 in proportion to priority.
        beta: 1 corrects the whole bias of the draw; may be set anew at any time.
        eps: Added to ``|td_error|``, so that every transition can be drawn.
    """

    def __init__(
        self,
        capacity: int,
        *args: Any,
        alpha: float = 0.6,
        beta: float = 0.4,
        eps: float = 1e-6,
        **kwargs: Any,
    ) -> None:
        """Take no memory yet."""
        self.alpha = number("alpha", alpha)
        self.beta = number("beta", beta)
        self._eps = number("eps", eps)
        super().__init__(capacity, *args, **kwargs)
        self._largest = 1.0
        self._tree: SumTree | None = None

    def sample(
        self, batch_size: int, sampler: Sampler | None = None, *, lazy: bool = True
    ) -> TensorDict:
        """A minibatch ``[batch_size]`` drawn by priority; a sampler is refused."""
        if sampler is not None:
            raise ConfigurationError("a prioritised buffer draws by priority; it takes no sampler")
        rows, weight = self._draw_by_priority(batch_size)
        weights = torch.from_numpy(weight)
        if self.device is not None:
            weights = weights.to(self.device)
        known = {"index": torch.from_numpy(rows), "weight": weights}
        return self._make(rows, known, lazy=lazy)

    def update_priorities(self, sample: TensorDict, td_error: Tensor) -> None:
        """Give the sampled transitions the priority ``|td_error| + eps``.

        ``td_error`` has one element a transition, lazy or not. Transitions that were replaced
        since are left out. Raises before anything changes if an error is not finite.
        """
        if "index" not in sample:
            raise ConfigurationError(
                "the minibatch has no 'index'; give the one that sample() of this buffer gave"
            )
        rows = sample["index"].cpu().numpy()
        errors = torch.as_tensor(td_error).detach()
        if errors.numel() != len(rows):
            raise BatchSizeError(
                f"td_error is {tuple(errors.shape)} for a minibatch of {len(rows)} transitions"
            )
        priorities = np.abs(errors.reshape(-1).to(torch.float64).cpu().numpy()) + self._eps
        if not np.isfinite(priorities).all():
            bad = int(np.count_nonzero(~np.isfinite(priorities)))
            raise ConfigurationError(f"{bad} of {len(rows)} td errors are not finite")
        self._set_priorities(rows, priorities)

    def _set_priorities(self, rows: Index, priorities: Any) -> None:
        assert self._tree is not None
        there = rows >= self._ring.first
        if not there.all():
            rows, priorities = rows[there], priorities[there]
        if len(rows):
            self._largest = max(self._largest, float(priorities.max()))
            self._tree.set(self._ring.slots(rows), priorities**self.alpha)

    def _draw_by_priority(self, size: int) -> tuple[Index, Any]:
        if type(size) is not int or size < 1:
            size = whole("batch_size", size)
        if len(self) == 0 or self._tree is None:
            raise StorageError("the buffer holds no transitions to sample")
        total = self._tree.total
        shares = np.arange(size) + self._generator.random(size)
        slots = self._tree.find(shares * (total / size))
        first = self._ring.first
        rows = first + (slots - first) % self.capacity
        drawn = self._tree.weights[slots]
        # Divided by the largest first: n and the total cancel, and no power overflows.
        weight = (drawn.min() / drawn) ** self.beta
        return rows, weight.astype(np.float32)

    def _on_stored(self, first: int, n: int, skip: Tensor | None) -> None:
        assert self._tree is not None
        weights: Any = self._largest**self.alpha
        if skip is not None:
            weights = np.where(skip.cpu().numpy(), 0.0, weights)
        self._tree.set(self._ring.slots(np.arange(first, first + n)), weights)

    def _set_columns(self, leaves: list[Any]) -> TransitionColumns:
        columns = super()._set_columns(leaves)
        column = self._storage.column("_tree", (self.capacity,), torch.float64, host=True)
        assert column.array is not None
        self._tree = SumTree(column.array)
        return columns

    def state(self) -> dict[str, Any]:
        """What the buffer is beside its columns, as JSON takes it."""
        own = {"alpha": self.alpha, "beta": self.beta, "eps": self._eps, "largest": self._largest}
        return {**super().state(), "prioritized": own}

    @classmethod
    def restored(cls, state: dict[str, Any], storage: Storage, settings: dict[str, Any]) -> Self:
        """The buffer of a :meth:`state` over columns that are filled already."""
        own = dict(state.get("prioritized", ()))
        largest = own.pop("largest", 1.0)
        buffer = super().restored(state, storage, {**own, **settings})
        buffer._largest = largest
        return buffer
