"""Hyperparameters are dataclasses; this reads, checks, writes and restores them."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Collection, Mapping
from typing import Any, ClassVar, Protocol, TypeVar

from koila_rl.agents.schedules import Linear, Schedule, at
from koila_rl.errors import ConfigurationError

__all__ = [
    "check_choice",
    "check_positive",
    "check_ranges",
    "check_widths",
    "describe",
    "read",
    "restore",
]


class _Dataclass(Protocol):
    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]


T = TypeVar("T", bound=_Dataclass)


def read(kind: type[T], given: Mapping[str, Any], agent: str) -> T:
    """The dataclass ``kind`` with ``given`` over its defaults.

    Raises:
        ConfigurationError: A name is unknown (near ones are named) or a value cannot be used.
    """
    fields = {field.name: field for field in dataclasses.fields(kind)}
    for name, value in given.items():
        if name not in fields:
            near = difflib.get_close_matches(name, fields, n=3)
            hint = f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(fields)}"
            raise ConfigurationError(f"{agent} has no hyperparameter {name!r}; {hint}")
        # Annotations are strings in every module of this project.
        expected = {"int": int, "bool": bool}.get(str(fields[name].type))
        if expected and (
            not isinstance(value, expected) or isinstance(value, bool) != (expected is bool)
        ):
            raise ConfigurationError(f"{name} is {value!r} but must be of type {expected.__name__}")
    return kind(**given)


def check_ranges(values: Any, **bounds: tuple[float, float]) -> None:
    """Check that each named field is a number, or a schedule starting, within its bounds."""
    for name, (low, high) in bounds.items():
        value: Schedule | None = getattr(values, name)
        if value is None:
            continue
        try:
            number = at(value, 1.0)
        except (TypeError, ValueError) as error:
            raise ConfigurationError(f"{name} is {value!r}, which is not a number") from error
        if not low <= number <= high:
            raise ConfigurationError(f"{name} is {number:g} but must be from {low:g} to {high:g}")


def check_positive(values: Any, *names: str) -> None:
    """Check that each named field is a number, or a schedule starting, above 0."""
    check_ranges(values, **{name: (0.0, float("inf")) for name in names})
    for name in names:
        value: Schedule | None = getattr(values, name)
        if value is not None and at(value, 1.0) == 0.0:
            raise ConfigurationError(f"{name} is 0 but must be above 0")


def check_choice(values: Any, name: str, known: Collection[str]) -> None:
    """Check that the named field is one of ``known``."""
    value = getattr(values, name)
    if value not in known:
        raise ConfigurationError(f"{name} is {value!r} but must be {' or '.join(known)}")


def check_widths(values: Any, name: str) -> None:
    """Check that the named field is None or a sequence of layer widths, whole numbers above 0."""
    value = getattr(values, name)
    if value is None:
        return
    widths = list(value) if isinstance(value, list | tuple) else [None]
    if not all(type(width) is int and width >= 1 for width in widths):
        raise ConfigurationError(
            f"{name} is {value!r} but must be widths of layers of at least 1, such as (64, 64)"
        )


def describe(values: Any) -> dict[str, Any]:
    """Numbers, strings, lists and dicts that say what ``values`` are, fit for JSON.

    A schedule that is a user's own function is written by its name and cannot be restored.
    """
    return {
        field.name: _describe(getattr(values, field.name)) for field in dataclasses.fields(values)
    }


def restore(description: Mapping[str, Any]) -> dict[str, Any]:
    """What to hand to :func:`read`; functions that could not be written are left out."""
    restored = {name: _restore(value) for name, value in description.items()}
    return {name: value for name, value in restored.items() if value is not _LOST}


_LOST = object()


def _describe(value: Any) -> Any:
    if isinstance(value, Linear):
        return {"linear": [value.start, value.end]}
    if callable(value):
        return {"function": getattr(value, "__qualname__", repr(value))}
    if isinstance(value, tuple):
        return list(value)
    return value


def _restore(value: Any) -> Any:
    if isinstance(value, Mapping):
        return Linear(*value["linear"]) if "linear" in value else _LOST
    if isinstance(value, list):
        return tuple(value)
    return value
