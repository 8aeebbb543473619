"""``wrap``: lazy minibatches from a buffer that is already there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from koila_rl.buffers.replay import ReplayBuffer
from koila_rl.buffers.rollout import RolloutBuffer
from koila_rl.errors import ConfigurationError
from koila_rl.wrapping import lazy

__all__ = ["LazyBuffer", "wrap"]


def wrap(buffer: Any) -> Any:
    """A buffer with the interface of ``buffer`` whose minibatches are lazy.

    Of Stable-Baselines3's rollout and replay buffers and of TorchRL's buffers over a tensor or
    memory-mapped storage, rows move when a microbatch runs; the result is an instance of the
    buffer's own class and shares its content. Of any other object that has ``sample`` or can be
    iterated, minibatches are drawn as ever and then wrapped, so the update is split, but the
    minibatch is whole in memory. Buffers of koila_rl are returned as they are.

    Raises:
        ConfigurationError: ``buffer`` has no ``sample`` and cannot be iterated.
    """
    if isinstance(buffer, (ReplayBuffer, RolloutBuffer)):
        return buffer
    bases = {base.__module__.partition(".")[0] for base in type(buffer).__mro__}
    if "stable_baselines3" in bases:
        from koila_rl.integrations.sb3_buffers import wrap_sb3

        return wrap_sb3(buffer)
    if "torchrl" in bases:
        from koila_rl.integrations.torchrl import wrap_torchrl

        return wrap_torchrl(buffer)
    if not callable(getattr(buffer, "sample", None)) and not hasattr(buffer, "__iter__"):
        raise ConfigurationError(
            f"{type(buffer).__name__} has no sample() and cannot be iterated; wrap takes a replay "
            "or rollout buffer, or an iterable of minibatches"
        )
    return LazyBuffer(buffer)


class LazyBuffer:
    """Stands for another buffer: all is passed on, and minibatches become lazy on the way."""

    def __init__(self, buffer: Any) -> None:
        self._buffer = buffer

    def sample(self, *args: Any, **kwargs: Any) -> Any:
        """What the buffer's own ``sample`` gives, lazy."""
        return _lazy(self._buffer.sample(*args, **kwargs))

    def __iter__(self) -> Iterator[Any]:
        """The buffer's own minibatches, lazy."""
        return (_lazy(minibatch) for minibatch in self._buffer)

    def __len__(self) -> int:
        """The buffer's own length."""
        return len(self._buffer)

    def __getitem__(self, index: Any) -> Any:
        """The buffer's own item, as it is."""
        return self._buffer[index]

    def __getattr__(self, name: str) -> Any:
        """The buffer's own attribute."""
        if name == "_buffer":  # before __init__, as while unpickling
            raise AttributeError(name)
        return getattr(self._buffer, name)

    def __repr__(self) -> str:
        """The buffer's own, named as wrapped."""
        return f"wrap({self._buffer!r})"


def _lazy(minibatch: Any) -> Any:
    # Tianshou's buffers give (Batch, indices); a Batch is a mapping by behaviour only.
    if isinstance(minibatch, tuple) and not hasattr(minibatch, "_fields"):
        return tuple(_lazy(item) for item in minibatch)
    if type(minibatch).__name__ == "Batch" and callable(getattr(minibatch, "items", None)):
        return type(minibatch)({key: _lazy(value) for key, value in minibatch.items()})
    return lazy(minibatch)
