"""Replay by compiled code: what has been replayed often is handed to ``torch.compile``.

Only where nothing changes by it: the compiled code is held against the generated code on copies
of its inputs first, values, gradients and time. Whatever goes wrong, the generated code stays.
"""

from __future__ import annotations

import itertools
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from koila_rl.engine.program import Program
from koila_rl.engine.replay import Body

__all__ = ["REPEATS", "Compiled", "compiled_body", "is_compiled", "refusal"]

# Runs of a program before it is compiled.
REPEATS = 50
# Runs of each kind that are timed.
_TRIALS = 10
# Largest deviation of values and gradients, of the largest magnitude among them.
ROUNDING = {torch.float64: 1e-11, torch.float32: 1e-5}


def refusal(program: Program) -> str:
    """Why a program is not compiled; "" where nothing is known against it."""
    for info in program.calls:
        if info.autocast is not None:
            return f"{info.name} runs under autocast"
        if info.random:
            return f"{info.name} draws random numbers"
        if info.effect:
            return f"{info.name} writes to a buffer"
    return ""


def compiled_body(program: Program, body: Body, key: Any, size: int, calls: int = 1) -> Body:
    """What to run in the place of ``body`` for ``size`` samples; ``key`` tells bodies apart.

    ``calls`` of it make one run of the program.
    """
    place = ("compiled", key, size, torch.is_grad_enabled())
    found = program.plans.get(place)
    if found is None:
        reason = refusal(program)
        if reason:
            _tell(f"a program stays uncompiled: {reason}")
        found = program.plans[place] = body if reason else Compiled(body, size, calls)
    replay: Body = found
    return replay


def is_compiled(result: Any) -> bool:
    """Whether a result carries a graph of compiled code, which cannot be differentiated twice."""
    return getattr(result, "_koila_rl_compiled", False)


class Compiled:
    """A body of replayed code that becomes compiled code after `REPEATS` runs.

    With other constants than those it was compiled with, it stays the generated code.
    """

    def __init__(self, body: Body, size: int, calls: int = 1) -> None:
        self.body, self.size = body, size
        self.left = REPEATS * calls
        self.fast: Callable[..., tuple[Any, ...]] | None = None
        # Floats are part of the compiled code: as symbols, some operators get them wrong.
        self.constants: list[Any] = []

    def __call__(self, n: int, c: Any, rnd: Any, effects: Any, *inputs: Any) -> tuple[Any, ...]:
        if self.fast is not None:
            if c != self.constants:
                return self.body(n, c, rnd, effects, *inputs)
            try:
                return tuple(map(_marked, self.fast(c, *inputs)))
            except torch.OutOfMemoryError:
                raise
            except Exception as error:
                self.give_up(error)
        elif self.left >= 0:
            self.left -= 1
            if self.left < 0:
                self.begin(c, inputs)
        return self.body(n, c, rnd, effects, *inputs)

    def begin(self, c: Any, inputs: Sequence[Any]) -> None:
        """Compile, and compare on copies of the inputs."""
        body, size = self.body, self.size
        self.constants = list(c)

        def flat(c: Any, *inputs: Any) -> tuple[Any, ...]:
            return body(size, c, None, None, *inputs)

        # The compiler keeps what it compiled by code object; this one must not be shared.
        flat.__code__ = flat.__code__.replace(co_name=f"replay_{next(_numbers)}")
        try:
            fast = torch.compile(flat, fullgraph=True, options={"guard_filter_fn": _no_guards})
            expected = _run(flat, c, inputs)
            # Or a graph that is kept could not be gone through twice.
            with torch._functorch.config.patch(donated_buffer=False):
                reason = _deviation(expected, _run(fast, c, inputs))
            reason = reason or _slower(lambda: _run(flat, c, inputs), lambda: _run(fast, c, inputs))
        except Exception as error:
            self.give_up(error)
        else:
            if reason:
                self.give_up(reason)
            else:
                self.fast = fast

    def give_up(self, reason: object) -> None:
        """Run the generated code from now on."""
        self.fast = None
        kind = "" if isinstance(reason, str) else f"{type(reason).__name__}: "
        first = str(reason).strip().splitlines() or [""]
        _tell(f"a program of {self.size:,} samples stays uncompiled: {kind}{first[0]}")


def _marked(result: Tensor) -> Tensor:
    if result.requires_grad:
        result._koila_rl_compiled = True  # type: ignore[attr-defined]
    return result


def _no_guards(entries: Sequence[Any]) -> list[bool]:
    """A program is recognised by its calls, shapes and types, and constants are compared here."""
    return [False] * len(entries)


Outcome = tuple[list[Tensor], list["Tensor | None"]]


def _run(function: Callable[..., Any], c: Any, inputs: Sequence[Any]) -> Outcome:
    """Results, and gradients of copies of the inputs, where gradients are on."""
    copies = [_copied(x) for x in inputs]
    results = list(function(c, *copies))
    roots = [x for x in results if x.requires_grad]
    leaves = [x for x in copies if isinstance(x, Tensor) and x.requires_grad]
    grads: list[Tensor | None] = []
    if roots and leaves and torch.is_grad_enabled():
        seeds = [torch.ones_like(x) for x in roots]
        grads += torch.autograd.grad(roots, leaves, seeds, allow_unused=True)
    return [x.detach() for x in results], grads


def _copied(x: Any) -> Any:
    if not isinstance(x, Tensor):
        return x
    if 0 in x.stride():
        copy = x.detach()
    else:
        copy = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
        copy.copy_(x.detach())
    return copy.requires_grad_(x.requires_grad)


def _deviation(expected: Outcome, found: Outcome) -> str:
    """What differs by more than rounding; "" where nothing does."""
    # A loss may be the small difference of large terms; its gradients tell their size.
    largest = max(_largest(x) for x in (*expected[0], *expected[1]))
    steepest = max((_largest(x) for x in expected[1]), default=0.0)
    for a, b in zip(expected[0], found[0], strict=True):
        if reason := _difference(a, b, largest):
            return reason
    for grad, other in zip(expected[1], found[1], strict=True):
        if grad is None or other is None:
            if grad is not other:
                return "a gradient is missing"
        elif reason := _difference(grad, other, steepest):
            return f"of the gradients, {reason}"
    return ""


def _slower(plain: Callable[[], object], fast: Callable[[], object]) -> str:
    """Compiled code that does not pay, as for small networks of few calls; "" if it does."""
    taken: dict[Callable[[], object], list[float]] = {plain: [], fast: []}
    for _ in range(_TRIALS):
        for run, times in taken.items():
            start = time.perf_counter()
            run()
            times.append(time.perf_counter() - start)
    before, after = (1e3 * min(times) for times in taken.values())
    return f"it took {after:.2f} ms compiled and {before:.2f} ms as it is" if after > before else ""


def _largest(x: Tensor | None) -> float:
    if x is None or not x.is_floating_point():
        return 0.0
    finite = x[x.isfinite()]
    return float(finite.abs().max()) if finite.numel() else 0.0


def _difference(a: Tensor, b: Tensor, scale: float) -> str:
    if a.shape != b.shape or a.dtype != b.dtype:
        return f"{a.dtype} of shape {tuple(a.shape)} is {b.dtype} of {tuple(b.shape)}"
    if a.dtype not in ROUNDING:
        return "" if torch.equal(a, b) else f"values of {a.dtype} differ"
    if torch.allclose(a, b, rtol=0.0, atol=ROUNDING[a.dtype] * scale, equal_nan=True):
        return ""
    return f"values differ by {float((a - b).abs().max()):.1e} where the largest is {scale:.1e}"


_numbers = itertools.count()
_told: set[str] = set()


def _tell(message: str) -> None:
    if message not in _told:
        _told.add(message)
        warnings.warn(f"koila_rl: {message}", RuntimeWarning, stacklevel=3)
