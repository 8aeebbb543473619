"""From recorded values to a program: the calls behind them, numbered, looked up or built."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from koila_rl.engine import recognition
from koila_rl.engine.build import build
from koila_rl.engine.program import Bound, Program
from koila_rl.recording.layouts import Layout
from koila_rl.recording.values import Call, Captured, Node, Source

__all__ = ["bind", "calls_behind"]


def calls_behind(roots: Iterable[Node]) -> list[Call]:
    """All calls that the roots depend on and that have no settled result, in program order."""
    found: dict[int, Call] = {}
    stack = [root.call for root in roots if root.attached is None]
    while stack:
        call = stack.pop()
        if isinstance(call, Source) or id(call) in found:
            continue
        found[id(call)] = call
        stack += [x.call for x in call.inputs if isinstance(x, Node) and x.attached is None]
    return sorted(found.values(), key=lambda call: call.sequence)


_PROGRAMS: dict[Any, Program] = {}
_LIMIT = 4096
# Of code that recognises a program, which needs one without settled values.
_TRIALS = 8


def bind(roots: Sequence[Node], target: Node | None = None) -> Bound:
    """The program behind ``roots``; with ``target``, the root that a backward starts from."""
    known = recognition.recognise(roots, target)
    if known is not None:
        return known
    calls = calls_behind(roots)
    numbers: dict[Any, int] = {}
    tensors: list[Any] = []
    described: list[Any] = []
    layouts: list[tuple[Layout | None, int, bool]] = []

    def number_of(x: Node | Captured) -> int:
        if isinstance(x, Node) and x.attached is None and isinstance(x.call, Call):
            return numbers[(id(x.call), x.index)]
        # One tensor met with and without gradients is two inputs.
        if isinstance(x, Captured):
            key: tuple[int, Any] = (id(x.tensor), x.requires_grad)
        else:
            key = (id(x.call), x.index)
        found = numbers.get(key)
        if found is None:
            found = numbers[key] = len(numbers)
            tensors.append((found, x))
            meta = x.meta if isinstance(x, Node) else None
            layout = meta.layout if meta is not None else None
            n = meta.n if meta is not None else 0
            grad = x.requires_grad if isinstance(x, Captured) else _wants_grad(x)
            settled = isinstance(x, Node) and x.attached is not None
            described.append((found, layout, n, grad, settled))
            layouts.append((layout, n, grad))
        return found

    form: list[Any] = []
    args: list[list[int]] = []
    for call in calls:
        ins = [number_of(x) for x in call.inputs]
        for index in range(len(call.info.metas)):
            numbers[(id(call), index)] = len(numbers)
        form.append((id(call.info), call.grad, *ins))
        args.append(ins)
    root_numbers = [number_of(root) for root in roots]
    aim = number_of(target) if target is not None else -1
    signature = (tuple(form), tuple(described), tuple(root_numbers), aim)
    program = _PROGRAMS.get(signature)
    if program is None:
        program = build(calls, args, numbers, tensors, layouts, root_numbers, aim)
        program.root_metas = [(x.meta.shape, x.meta.dtype, x.meta.device) for x in roots]
        if len(_PROGRAMS) >= _LIMIT:
            _PROGRAMS.clear()
            recognition.forget()
        _PROGRAMS[signature] = program
    consts = [const for call in calls for const in call.consts]
    captured = [
        (x, call)
        for call in calls
        if not getattr(call.info.func, "unchecked", False)
        for x in call.inputs
        if isinstance(x, Captured)
    ]
    bound = Bound(program, [x for _, x in tensors], calls, consts, list(roots), captured)
    program.met += 1
    if 1 < program.met < _TRIALS and not program.recognised:
        program.recognised = recognition.remember(bound, target)
    return bound


def _wants_grad(node: Node) -> bool:
    if node.attached is not None:
        return node.attached.requires_grad
    return isinstance(node.call, Source) and node.meta.requires_grad
