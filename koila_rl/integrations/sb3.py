"""Stable-Baselines3 in one line: ``attach(model)``, then ``model.learn()`` as ever.

An attached model is an instance of a subclass of its own class whose ``train()`` sees its buffer
through :func:`koila_rl.wrap`, within the limits. Outside ``train()`` nothing differs: the model
collects, saves and loads with the buffer it made itself.
"""

from __future__ import annotations

from typing import Any

from koila_rl.errors import ConfigurationError
from koila_rl.integrations.attachment import (
    Attachment,
    attached_class,
    check_version,
    missing,
    plain_class,
    refuse,
)

try:
    from stable_baselines3.common.base_class import BaseAlgorithm
except ImportError as error:
    raise missing("Stable-Baselines3", "sb3") from error

from koila_rl.integrations.sb3_buffers import wrap_sb3

__all__ = ["SUPPORTED", "attach", "detach", "wrap_sb3"]

SUPPORTED = ("PPO", "A2C", "DQN", "SAC", "TD3", "DDPG", "RecurrentPPO", "QRDQN", "TQC")
"""The algorithms of Stable-Baselines3 and of its contrib package that ``attach`` takes."""

TESTED = {"stable-baselines3": ("2.7", "2.10"), "sb3-contrib": ("2.7", "2.10")}


def attach(
    model: Any, memory: int | float | str | None = "auto", microbatch: int | None = None
) -> Any:
    """Let a model of Stable-Baselines3 update within memory, exactly as it would without.

    Args:
        model: an algorithm of :data:`SUPPORTED`, or of a subclass of one.
        memory: as in :func:`koila_rl.limits`; ``"auto"`` goes by the limits around ``learn()``,
            and without any by what the device has free.
        microbatch: samples that run at once; left out, the planner chooses. Of ``RecurrentPPO``
            a sample is a sequence.

    Returns:
        The same model. Attached again, it takes the new limits.

    Raises:
        UnsupportedError: another algorithm; the message names those that are supported.
        ConfigurationError: ``model`` is none of Stable-Baselines3's, or a limit does not parse.

    >>> model = koila_rl.integrations.sb3.attach(PPO("MlpPolicy", "CartPole-v1"))  # doctest: +SKIP
    """
    if not isinstance(model, BaseAlgorithm):
        raise ConfigurationError(
            f"attach() takes an algorithm of Stable-Baselines3, got {type(model).__name__}; "
            "of a loop of your own, wrap the buffer with koila_rl.wrap()"
        )
    attachment = Attachment(memory, microbatch)
    kind = plain_class(type(model))
    theirs = [base for base in kind.__mro__ if _package(base) in _PACKAGES]
    known = next((base for base in theirs if base.__name__ in SUPPORTED), None)
    if known is None:
        raise refuse("Stable-Baselines3", kind, SUPPORTED)
    for name in dict.fromkeys(("stable_baselines3", _package(known))):
        package = _PACKAGES[name]
        check_version(package, TESTED[package])
    model.__class__ = _attached(kind, attachment)
    return model


def detach(model: Any) -> Any:
    """The same model as it was before :func:`attach`; one that is not attached stays as it is."""
    kind = plain_class(type(model))
    if kind is not type(model):
        model.__class__ = kind
    return model


def _attached(kind: type[Any], attachment: Attachment) -> type[Any]:
    """A subclass whose update draws lazy minibatches, within limits."""

    def train(self: Any, *args: Any, **kwargs: Any) -> None:
        name = "rollout_buffer" if hasattr(self, "rollout_buffer") else "replay_buffer"
        plain = getattr(self, name)
        # Only for the update, so that a save or a callback meets the buffer it knows.
        setattr(self, name, wrap_sb3(plain))
        try:
            with attachment.limits():
                kind.train(self, *args, **kwargs)
        finally:
            setattr(self, name, plain)

    return attached_class(kind, attachment, _restored, train=train)


def _restored(kind: type[Any], state: dict[str, Any], attachment: Attachment) -> Any:
    model = object.__new__(kind)
    model.__dict__.update(state)
    return attach(model, attachment.memory, attachment.microbatch)


_PACKAGES = {"stable_baselines3": "stable-baselines3", "sb3_contrib": "sb3-contrib"}


def _package(kind: type[Any]) -> str:
    return kind.__module__.partition(".")[0]
