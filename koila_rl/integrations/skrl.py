"""skrl in one line: ``attach(agent)``, then the trainer as ever.

While an attached agent updates, its memory gives lazy minibatches; collecting and storing do not
change.
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
from koila_rl.wrapping import lazy

try:
    from skrl.agents.torch import Agent
except ImportError as error:
    raise missing("skrl", "skrl") from error

__all__ = ["SUPPORTED", "attach", "detach"]

SUPPORTED = ("PPO", "DQN", "DDQN")
"""The agents of skrl that ``attach`` takes."""

TESTED = ("2.1", "2.2")


def attach(
    agent: Any, memory: int | float | str | None = "auto", microbatch: int | None = None
) -> Any:
    """Let an agent of skrl update within memory, exactly as it would without.

    Args:
        agent: of a class in :data:`SUPPORTED`, for PyTorch.
        memory: as in :func:`koila_rl.limits`; ``"auto"`` goes by the limits around the training.
        microbatch: samples that run at once; left out, the planner chooses.

    Returns:
        The same agent. Attached again, it takes the new limits.

    Raises:
        UnsupportedError: another agent; the message names those that are supported.
        ConfigurationError: ``agent`` is none of skrl's, or a limit does not parse.
    """
    if not isinstance(agent, Agent):
        raise ConfigurationError(
            f"attach() takes an agent of skrl for PyTorch, got {type(agent).__name__}"
        )
    attachment = Attachment(memory, microbatch)
    kind = plain_class(type(agent))
    if not any(
        base.__name__ in SUPPORTED and base.__module__.startswith("skrl.") for base in kind.__mro__
    ):
        raise refuse("skrl", kind, SUPPORTED)
    check_version("skrl", TESTED)

    def update(self: Any, **kwargs: Any) -> None:
        plain = self.memory
        self.memory = _LazyMemory(plain)
        try:
            with attachment.limits():
                kind.update(self, **kwargs)
        finally:
            self.memory = plain

    agent.__class__ = attached_class(kind, attachment, _restored, update=update)
    return agent


def detach(agent: Any) -> Any:
    """The same agent as it was before :func:`attach`."""
    if (kind := plain_class(type(agent))) is not type(agent):
        agent.__class__ = kind
    return agent


def _restored(kind: type[Any], state: dict[str, Any], attachment: Attachment) -> Any:
    agent = object.__new__(kind)
    agent.__dict__.update(state)
    return attach(agent, attachment.memory, attachment.microbatch)


class _LazyMemory:
    """An agent's memory whose ``sample`` gives lazy minibatches."""

    def __init__(self, memory: Any) -> None:
        self._memory = memory

    def sample(self, *args: Any, **kwargs: Any) -> list[Any]:
        # Each minibatch on its own: the last may be smaller.
        return [lazy(minibatch) for minibatch in self._memory.sample(*args, **kwargs)]

    def __len__(self) -> int:
        return len(self._memory)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._memory, name)
