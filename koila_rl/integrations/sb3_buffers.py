"""Stable-Baselines3's buffers with lazy minibatches.

A wrapped buffer is an instance of a subclass of the buffer's class over the same attributes:
collecting, computing advantages, drawing and the random state are Stable-Baselines3's own. Only
the last step is ours: the indices drawn become row sources instead of gathered arrays.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from stable_baselines3.common import buffers as theirs
from stable_baselines3.common.type_aliases import (
    DictReplayBufferSamples,
    DictRolloutBufferSamples,
    ReplayBufferSamples,
    RolloutBufferSamples,
)
from torch import Tensor

from koila_rl.buffers.delivery import worker_is_done
from koila_rl.buffers.gathering import take
from koila_rl.buffers.rows import ColumnRows
from koila_rl.buffers.sample import Kept
from koila_rl.errors import ConfigurationError
from koila_rl.wrapping import lazy, lazy_rows

__all__ = ["wrap_sb3"]

Array: TypeAlias = "npt.NDArray[Any]"
Gather: TypeAlias = Callable[[Array], Tensor]

# Bytes one minibatch may keep of rows that are overwritten before it runs.
_SAVE_LIMIT = 256 * 2**20
_drawn: weakref.WeakKeyDictionary[Any, list[weakref.ref[_Drawn]]] = weakref.WeakKeyDictionary()


def wrap_sb3(buffer: Any) -> Any:
    """The buffer with lazy minibatches; give it back to the algorithm in place of the first.

    >>> model.rollout_buffer = koila_rl.wrap(model.rollout_buffer)  # doctest: +SKIP
    """
    if isinstance(buffer, (_LazyRollout, _LazyReplay)):
        return buffer
    if not isinstance(buffer, theirs.BaseBuffer):
        raise ConfigurationError(
            f"{type(buffer).__name__} is no buffer of Stable-Baselines3; wrap model.rollout_buffer "
            "or model.replay_buffer"
        )
    wrapped = object.__new__(_subclass(type(buffer)))
    # One set of attributes for both: what is stored through either is there for both.
    wrapped.__dict__ = buffer.__dict__
    return wrapped


@functools.cache
def _subclass(kind: type[theirs.BaseBuffer]) -> type[Any]:
    mixin = _LazyRollout if issubclass(kind, theirs.RolloutBuffer) else _LazyReplay
    return type(f"Lazy{kind.__name__}", (mixin, kind), {"_kind": kind})


def _unwrapped(wrapped: Any) -> Any:
    plain = object.__new__(wrapped._kind)
    plain.__dict__ = wrapped.__dict__
    return plain


class _LazyRollout:
    """Over RolloutBuffer and DictRolloutBuffer; ``reset`` makes new arrays, so rows stay."""

    _kind: type[theirs.BaseBuffer]

    def __reduce__(self) -> tuple[Any, ...]:
        return wrap_sb3, (_unwrapped(self),)

    def _get_samples(self, batch_inds: Array, env: Any = None) -> Any:
        buffer: Any = self
        if not _is_stock(self._kind, theirs.RolloutBuffer, theirs.DictRolloutBuffer):
            drawn_whole = super()._get_samples(batch_inds, env)  # type: ignore[misc]
            if hasattr(drawn_whole, "lstm_states"):
                return _lazy_sequences(drawn_whole)
            return lazy(drawn_whole)
        drawn = _Drawn(np.asarray(batch_inds), torch.device(buffer.device))
        flat = {
            "old_values": buffer.values,
            "old_log_prob": buffer.log_probs,
            "advantages": buffer.advantages,
            "returns": buffer.returns,
        }
        columns = {key: drawn.column(key, array.reshape(-1)) for key, array in flat.items()}
        actions = drawn.column("actions", buffer.actions, torch.float32)
        observations = _observations(drawn, "observations", buffer.observations)
        kind: Any = DictRolloutBufferSamples if isinstance(observations, dict) else (
            RolloutBufferSamples
        )  # fmt: skip
        return kind(observations=observations, actions=actions, **columns)


class _LazyReplay:
    """Over ReplayBuffer and DictReplayBuffer; ``add`` overwrites, so rows are gathered before.

    Subclasses that make rows in a way of their own (n-step, hindsight) and normalised sampling
    draw as ever; their minibatches are wrapped whole.
    """

    _kind: type[theirs.BaseBuffer]

    def __reduce__(self) -> tuple[Any, ...]:
        return wrap_sb3, (_unwrapped(self),)

    def add(self, *args: Any, **kwargs: Any) -> None:
        buffer: Any = self
        size, n_envs = buffer.buffer_size, buffer.n_envs
        # Where next observations share the array, the slots beside the cursor change too.
        near = np.array([-1, 0, 1]) if buffer.optimize_memory_usage else np.array([0])
        written = ((buffer.pos + near) % size)[:, None] * n_envs + np.arange(n_envs)
        live = [drawn for ref in _drawn.get(self, ()) if (drawn := ref()) is not None]
        if live:
            _drawn[self] = [weakref.ref(drawn) for drawn in live]
            for drawn in live:
                drawn.before_overwriting(written.reshape(-1))
        super().add(*args, **kwargs)  # type: ignore[misc]

    def sample(self, batch_size: int, env: Any = None) -> Any:
        return lazy(super().sample(batch_size, env))  # type: ignore[misc]

    def _get_samples(self, batch_inds: Array, env: Any = None) -> Any:
        buffer: Any = self
        stock = _is_stock(self._kind, theirs.ReplayBuffer, theirs.DictReplayBuffer)
        if env is not None or not stock:
            return super()._get_samples(batch_inds, env)  # type: ignore[misc]
        # The same call as theirs, so that the same seed draws the same rows.
        env_indices = np.random.randint(0, high=buffer.n_envs, size=(len(batch_inds),))  # noqa: NPY002
        size, n_envs = buffer.buffer_size, buffer.n_envs
        flat = batch_inds * n_envs + env_indices
        drawn = _Drawn(flat, torch.device(buffer.device))
        live = _drawn.setdefault(self, [])
        live[:] = [ref for ref in live if ref() is not None] if len(live) > 32 else live
        live.append(weakref.ref(drawn))

        def joined(array: Array) -> Array:
            flat: Array = array.reshape(size * n_envs, *array.shape[2:])
            return flat

        dones, timeouts = joined(buffer.dones), joined(buffer.timeouts)
        if buffer.optimize_memory_usage:
            following = _observations(
                drawn, "next_observations", _tree(joined, buffer.observations),
                lambda at: (at + n_envs) % (size * n_envs),
            )  # fmt: skip
        else:
            following = _observations(
                drawn, "next_observations", _tree(joined, buffer.next_observations)
            )
        samples: Any = DictReplayBufferSamples if isinstance(following, dict) else (
            ReplayBufferSamples
        )  # fmt: skip
        return samples(
            observations=_observations(drawn, "observations", _tree(joined, buffer.observations)),
            actions=drawn.column("actions", joined(buffer.actions)),
            next_observations=following,
            dones=drawn.gathered(
                "dones",
                lambda at: torch.from_numpy((dones[at] * (1 - timeouts[at])).reshape(-1, 1)),
            ),
            rewards=drawn.column("rewards", joined(buffer.rewards).reshape(-1, 1)),
        )


class _Drawn:
    """The indices of one minibatch, and the columns made from them."""

    def __init__(self, index: Array, device: torch.device) -> None:
        self.index = index
        self.device = device
        self._gathers: dict[str, Gather] = {}
        self._gone = np.zeros(len(index), dtype=bool)
        self._kept = Kept(_SAVE_LIMIT)

    def column(self, key: str, array: Array, dtype: torch.dtype | None = None) -> Tensor:
        """The rows of ``array`` at the indices, cast where ``dtype`` is given."""

        def gather(at: Array) -> Tensor:
            rows = take(array, at)
            return rows if dtype is None else rows.to(dtype)

        return self.gathered(key, gather)

    def gathered(self, key: str, gather: Gather) -> Tensor:
        """A lazy tensor of what ``gather`` makes of the indices."""
        self._gathers[key] = gather
        return lazy_rows(ColumnRows(_Source(self, key), self.device))

    def gather(self, key: str, start: int, stop: int) -> Tensor:
        """Rows ``start:stop`` of a column, as they were when the minibatch was drawn."""
        rows = self._gathers[key](self.index[start:stop])
        self._kept.patch(key, rows, start, min(stop, len(self.index)))
        return rows

    def before_overwriting(self, slots: Array) -> None:
        """Gather the rows in these slots."""
        hit = np.flatnonzero(np.isin(self.index, slots) & ~self._gone)
        if self._kept.stale or len(hit) == 0:
            return
        worker_is_done()
        self._gone[hit] = True
        row_bytes = sum(gather(self.index[:1]).nbytes for gather in self._gathers.values())
        self._kept.keep(hit, len(self.index), row_bytes, lambda: self._all(self.index[hit]))

    def check(self) -> None:
        """Raise :class:`StaleValueError` if rows were overwritten and not kept."""
        self._kept.check()

    def _all(self, at: Array) -> dict[Any, Tensor]:
        return {key: gather(at) for key, gather in self._gathers.items()}


class _Source:
    """One column of a minibatch, as ``ColumnRows`` asks for it."""

    slow = False
    device = torch.device("cpu")

    def __init__(self, drawn: _Drawn, key: str) -> None:
        self._drawn, self._key = drawn, key
        one = drawn.gather(key, 0, 1)
        self.shape = torch.Size([len(drawn.index), *one.shape[1:]])
        self.dtype = one.dtype

    def gather(self, start: int, stop: int, out: Tensor | None = None) -> Tensor:
        rows = self._drawn.gather(self._key, start, stop)
        return rows if out is None else out.copy_(rows)

    def check(self) -> None:
        self._drawn.check()


def _observations(
    drawn: _Drawn, label: str, arrays: Any, shift: Callable[[Array], Array] | None = None
) -> Any:
    def column(key: str, array: Array) -> Tensor:
        if shift is None:
            return drawn.column(key, array)
        moved = shift
        return drawn.gathered(key, lambda at: take(array, moved(at)))

    if isinstance(arrays, dict):
        return {key: column(f"{label}/{key}", array) for key, array in arrays.items()}
    return column(label, arrays)


def _lazy_sequences(samples: Any) -> Any:
    """A minibatch of contrib's recurrent buffers: padded sequences one after the other.

    Rows are ``[sequences · steps, …]`` and states ``[layers, sequences, hidden]``; a sample is a
    sequence.
    """
    states = lazy(samples.lstm_states, batch=1)
    n_sequences = samples.lstm_states.pi[0].shape[1]

    def sequences(rows: Any) -> Any:
        if isinstance(rows, dict):
            return {key: sequences(value) for key, value in rows.items()}
        return lazy(rows.reshape(n_sequences, -1, *rows.shape[1:])).flatten(0, 1)

    others = {
        key: sequences(rows) for key, rows in samples._asdict().items() if key != "lstm_states"
    }
    return type(samples)(**others, lstm_states=states)


def _tree(change: Callable[[Array], Array], arrays: Any) -> Any:
    if isinstance(arrays, dict):
        return {key: change(array) for key, array in arrays.items()}
    return change(arrays)


def _is_stock(kind: type[theirs.BaseBuffer], *known: type[theirs.BaseBuffer]) -> bool:
    return any(kind._get_samples is stock._get_samples for stock in known)
