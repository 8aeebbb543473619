"""Batch sizes that remember what they are.

``x.shape[0]`` of a lazy tensor is an ``int`` of value N. When a recorded call that uses it as a
*shape* is replayed on a microbatch of n samples it becomes n; used as a *number* (``loss / B``)
it stays N. Arithmetic with plain integers is remembered.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

__all__ = ["BatchInt", "batch_shape"]


class BatchInt(int):
    """An integer that is a function of the minibatch size: ``value(N)``.

    ``base`` is that N: a program may have minibatches of several sizes. 0 fits any.
    """

    value: Callable[[int], int]
    code: str
    base: int

    def __new__(
        cls, number: int, value: Callable[[int], int], code: str, base: int = 0
    ) -> BatchInt:
        self = super().__new__(cls, number)
        self.value = value
        self.code = code
        self.base = base
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return (int, (int(self),))

    def __deepcopy__(self, memo: dict[int, Any]) -> BatchInt:
        return self


def _arithmetic(name: str, symbol: str, reflected: bool) -> Callable[[BatchInt, Any], Any]:
    compute = getattr(operator, name)

    def method(self: BatchInt, other: Any) -> Any:
        if not isinstance(other, int) or isinstance(other, bool):
            plain = int(self)
            return compute(other, plain) if reflected else compute(plain, other)
        if isinstance(other, BatchInt) and other.base != self.base:
            # Of two minibatches: a plain number.
            return compute(int(other), int(self)) if reflected else compute(int(self), int(other))
        mine = self.value
        theirs = other.value if isinstance(other, BatchInt) else None
        text = other.code if isinstance(other, BatchInt) else repr(int(other))
        fixed = int(other)

        def value(n: int) -> int:
            second = theirs(n) if theirs is not None else fixed
            result = compute(second, mine(n)) if reflected else compute(mine(n), second)
            return int(result)

        number = compute(fixed, int(self)) if reflected else compute(int(self), fixed)
        left, right = (text, self.code) if reflected else (self.code, text)
        return BatchInt(number, value, f"({left}{symbol}{right})", self.base)

    return method


for _name, _symbol in (
    ("add", "+"),
    ("sub", "-"),
    ("mul", "*"),
    ("floordiv", "//"),
    ("mod", "%"),
):
    setattr(BatchInt, f"__{_name}__", _arithmetic(_name, _symbol, reflected=False))
    setattr(BatchInt, f"__r{_name}__", _arithmetic(_name, _symbol, reflected=True))


def _negative(self: BatchInt) -> BatchInt:
    mine = self.value
    return BatchInt(-int(self), lambda n: -mine(n), f"(-{self.code})", self.base)


BatchInt.__neg__ = _negative  # type: ignore[assignment,method-assign]


def batch_shape(n: int, factor: int = 1) -> BatchInt:
    """The size ``factor * N`` of a batched dimension."""
    if factor == 1:
        return BatchInt(n, lambda size: size, "n", n)
    return BatchInt(factor * n, lambda size: factor * size, f"({factor}*n)", n)
