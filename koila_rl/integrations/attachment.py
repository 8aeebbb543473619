"""What every ``attach`` shares: limits that hold while a library trains, and its version."""

from __future__ import annotations

import importlib.metadata
import warnings
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from koila_rl.errors import MissingDependencyError, UnsupportedError
from koila_rl.memory.limits import Limits, limits

__all__ = ["Attachment", "attached_class", "check_version", "missing", "plain_class", "refuse"]


@dataclass(frozen=True, slots=True)
class Attachment:
    """The limits that ``attach`` was given; ``memory="auto"`` leaves those of the caller."""

    memory: int | float | str | None = "auto"
    microbatch: int | None = None

    def __post_init__(self) -> None:
        with self.limits():
            """Bad values are refused before anything is attached."""

    def limits(self) -> AbstractContextManager[Limits]:
        """The context in which the library's own update runs."""
        memory = None if self.memory == "auto" else self.memory
        return limits(memory=memory, microbatch=self.microbatch)


def attached_class(
    kind: type[Any], attachment: Attachment, restore: Callable[..., Any], **methods: Any
) -> type[Any]:
    """A subclass of ``kind`` with some methods of its own, for one instance to change to.

    ``restore(kind, state, attachment)`` makes a copy or unpickles: the subclass has no name by
    which it could be found.
    """

    def reduce(self: Any, protocol: Any) -> Any:
        return restore, (kind, self.__dict__, attachment)

    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    members = {"_koila_kind": kind, "__reduce_ex__": reduce, **names, **methods}
    # One base and no slots, or Python would not let an instance change its class.
    return type(kind.__name__, (kind,), members)


def plain_class(kind: type[Any]) -> type[Any]:
    """The class that an instance had before it was attached; its own if it was not."""
    plain: type[Any] = getattr(kind, "_koila_kind", kind)
    return plain


def check_version(package: str, tested: tuple[str, str]) -> None:
    """Warn if the installed version is not within ``tested``: from the first to below the second.

    >>> check_version("torch", ("2.11", "3"))
    """
    found = importlib.metadata.version(package)
    if not _numbers(tested[0]) <= _numbers(found) < _numbers(tested[1]):
        warnings.warn(
            f"{package} {found} is installed, but koila_rl was tested with {tested[0]} to below "
            f"{tested[1]}; compare one update with and without attach() before you rely on it",
            stacklevel=3,
        )


def _numbers(version: str) -> tuple[int, ...]:
    parts = version.split("+")[0].split(".")
    return tuple(int("".join(c for c in part if c.isdigit()) or 0) for part in parts[:3])


def refuse(library: str, kind: type[object], supported: Iterable[str]) -> UnsupportedError:
    """The error for an algorithm that ``attach`` does not know."""
    return UnsupportedError(
        f"{kind.__name__} of {library} is not supported; supported are {', '.join(supported)}. "
        "In a loop of your own, wrap its minibatches with koila_rl.lazy()"
    )


def missing(library: str, extra: str) -> MissingDependencyError:
    """The error for a library that is not installed, with the extra that installs it."""
    return MissingDependencyError(
        f"{library} is not installed; install it with: pip install 'koila-rl[{extra}]'"
    )
