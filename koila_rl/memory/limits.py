"""Limits that hold when a program runs: memory and microbatch size."""

from __future__ import annotations

import contextvars
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from koila_rl.errors import ConfigurationError
from koila_rl.memory.budget import parse_bytes

__all__ = ["Limits", "current_limits", "limits", "set_limits"]


@dataclass(frozen=True, slots=True)
class Limits:
    """``memory`` an update may take above what is resident; ``microbatch`` samples at once."""

    memory: int | float | str | None = None
    microbatch: int | None = None
    tune: bool = False
    compile: bool = False


_DEFAULT = Limits()
_process = _DEFAULT
_scoped: contextvars.ContextVar[Limits | None] = contextvars.ContextVar("limits", default=None)


def current_limits() -> Limits:
    return _scoped.get() or _process


def _changed(base: Limits, **settings: Any) -> Limits:
    given = {name: value for name, value in settings.items() if value is not None}
    microbatch = given.get("microbatch")
    whole = isinstance(microbatch, int) and not isinstance(microbatch, bool)
    if microbatch is not None and not (whole and microbatch >= 1):
        raise ConfigurationError(
            f"microbatch must be a whole number of samples, at least 1, got {microbatch!r}; "
            "leave it out to let the planner choose"
        )
    memory = given.get("memory")
    if isinstance(memory, str) or (memory is not None and not isinstance(memory, float)):
        parse_bytes(memory)
    elif memory is not None:
        parse_bytes(memory, free=1 << 40)
    for name in ("tune", "compile"):
        if not isinstance(given.get(name, False), bool):
            raise ConfigurationError(f"{name} must be True or False, got {given[name]!r}")
    return replace(base, **given)


@contextmanager
def limits(
    memory: int | float | str | None = None,
    microbatch: int | None = None,
    tune: bool | None = None,
    compile: bool | None = None,
) -> Iterator[Limits]:
    """Limits for the programs that run inside the ``with`` block, in this context.

    Args:
        memory: what an update may take above what is resident when it starts: bytes, a text
            like ``"2GiB"``, or a fraction of what is free, as a float in (0, 1].
        microbatch: samples that run at once; overrides the planner.
        tune: time the sizes that fit over the first updates of each program and keep the
            fastest. Results stay the same to rounding; which size it is depends on the machine.
        compile: hand programs to ``torch.compile`` that have run fifty times. The compiled code
            is first held against the other, values and gradients, and replaces it only if they
            agree to 1e-5 in float32 and it is faster. Programs under autocast, with random
            numbers or with BatchNorm in training stay as they are, as do those that cannot be
            compiled; a warning says so once. With a float that changes between runs, as an
            annealed clip range, the code that is not compiled runs. Takes seconds, and memory
            beside the budget while it tries.

    Raises:
        ConfigurationError: for a size below 1 or a memory that does not parse.
    """
    inner = _changed(
        current_limits(), memory=memory, microbatch=microbatch, tune=tune, compile=compile
    )
    token = _scoped.set(inner)
    try:
        yield inner
    finally:
        _scoped.reset(token)


def set_limits(
    memory: int | float | str | None = None,
    microbatch: int | None = None,
    tune: bool | None = None,
    compile: bool | None = None,
) -> None:
    """`limits` for the whole process; called without arguments, back to the defaults."""
    global _process
    _process = _changed(_DEFAULT, memory=memory, microbatch=microbatch, tune=tune, compile=compile)
