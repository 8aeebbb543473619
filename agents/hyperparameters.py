"""Hyperparameters are dataclasses; this reads, checks, writes and restores them."""

from __future__ import annotations

import collections.abc
import dataclasses
import difflib
import math
import sys
import types
import typing
from collections.abc import Collection, Mapping
from numbers import Integral, Real
from typing import Any, ClassVar, Protocol, TypeVar

import numpy as np

from koila_rl.agents.schedules import Linear, Schedule, at
from koila_rl.errors import ConfigurationError

__all__ = [
    "FINITE",
    "check_at",
    "check_choice",
    "check_positive",
    "check_ranges",
    "check_widths",
    "describe",
    "lost",
    "read",
    "restore",
]

FINITE = sys.float_info.max
"""The upper bound of what may be any number but infinity."""

_EXPECTED: dict[Any, str] = {
    bool: "True or False",
    int: "a whole number",
    float: "a number",
    str: "a string",
    tuple: "a tuple of whole numbers",
    collections.abc.Callable: "a function of the remaining progress",
    types.NoneType: "None",
}


class _Dataclass(Protocol):
    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]


T = TypeVar("T", bound=_Dataclass)


def read(kind: type[T], given: Mapping[str, Any], agent: str) -> T:
    """The dataclass ``kind`` with ``given`` over its defaults, each of the type it is annotated as.

    Numbers of numpy become Python's, whole ones floats where a float is meant, lists tuples.

    Raises:
        ConfigurationError: A name is unknown (near ones are named) or a value is of another type.
    """
    fields, hints = [field.name for field in dataclasses.fields(kind)], typing.get_type_hints(kind)
    values: dict[str, Any] = {}
    for name, value in given.items():
        if name not in fields:
            near = difflib.get_close_matches(name, fields, n=3)
            hint = f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(fields)}"
            raise ConfigurationError(f"{agent} has no hyperparameter {name!r}; {hint}")
        types_ = _options(hints[name])
        fitting = [found for one in types_ if (found := _as(value, one)) is not _UNFIT]
        if not fitting:
            expected = " or ".join(_EXPECTED[one] for one in types_)
            raise ConfigurationError(f"{name} is {value!r} but must be {expected}")
        values[name] = fitting[0]
    return kind(**values)


_UNFIT = object()


def _options(hint: Any) -> list[Any]:
    """The types of a union, or the one, without what stands in brackets."""
    union = isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union
    return [typing.get_origin(one) or one for one in (typing.get_args(hint) if union else (hint,))]


def _as(value: Any, kind: Any) -> Any:
    """``value`` as a ``kind`` of :data:`_EXPECTED`, or ``_UNFIT``; True is no number."""
    if isinstance(value, bool | np.bool_):
        return bool(value) if kind is bool else _UNFIT
    if kind is int:
        return int(value) if isinstance(value, Integral) else _UNFIT
    if kind is float:
        return float(value) if isinstance(value, Real) else _UNFIT
    if kind is tuple:
        items = [_as(item, int) for item in value] if isinstance(value, list | tuple) else [_UNFIT]
        return _UNFIT if _UNFIT in items else tuple(items)
    return value if isinstance(value, kind) else _UNFIT


def check_ranges(values: Any, **bounds: tuple[float, float]) -> None:
    """Check that each named field lies within its bounds; a schedule at its start and its end."""
    for progress in (1.0, 0.0):
        check_at(values, progress, **bounds)


def check_at(values: Any, progress: float, **bounds: tuple[float, float]) -> None:
    """Check that each named field lies within its bounds when ``progress`` remains."""
    for name, (low, high) in bounds.items():
        value: Schedule | None = getattr(values, name)
        if value is None:
            continue
        where = f" at progress {progress:g}" if callable(value) else ""
        try:
            number = at(value, progress)
        except (TypeError, ValueError) as error:
            raise ConfigurationError(f"{name} is {value!r}, no number{where}: {error}") from error
        if not low <= number <= high:
            words = _words(low, high, number)
            raise ConfigurationError(f"{name} is {number:g}{where} but must be {words}")


def _words(low: float, high: float, number: float) -> str:
    if high < FINITE:
        return f"from {low:g} to {high:g}"
    return f"at least {low:g}" if math.isfinite(number) else "finite"


def check_positive(values: Any, *names: str) -> None:
    """Check that each named field is a finite number above 0, or a schedule that starts above."""
    check_ranges(values, **dict.fromkeys(names, (0.0, FINITE)))
    optional = [field.name for field in dataclasses.fields(values) if field.default is None]
    for name in names:
        value: Schedule | None = getattr(values, name)
        if value is not None and at(value, 1.0) == 0.0:
            off = "; None switches it off" if name in optional else ""
            raise ConfigurationError(f"{name} is 0 but must be above 0{off}")


def check_choice(values: Any, name: str, known: Collection[str]) -> None:
    """Check that the named field is one of ``known``."""
    value = getattr(values, name)
    if value not in known:
        raise ConfigurationError(f"{name} is {value!r} but must be {' or '.join(known)}")


def check_widths(values: Any, name: str) -> None:
    """Check that the named field is None or widths of layers, above 0."""
    value = getattr(values, name)
    if value is not None and not all(width >= 1 for width in value):
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
    functions = lost(description)
    return {name: _restore(value) for name, value in description.items() if name not in functions}


def lost(description: Mapping[str, Any]) -> dict[str, str]:
    """Names of the functions that :func:`describe` could not write, by hyperparameter."""
    return {
        name: value["function"]
        for name, value in description.items()
        if isinstance(value, Mapping) and "function" in value
    }


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
        return Linear(*value["linear"])
    if isinstance(value, list):
        return tuple(value)
    return value
