"""Programs that were bound before are recognised by code generated for them.

To know a program, its calls must be compared one by one: analysis, operands, order. A generated
function does so in straight lines, beginning at the roots, and gathers what a run needs on the
way. It knows nothing of values that are settled; such programs are bound the general way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from koila_rl.engine.program import Bound, Program
from koila_rl.recording.values import Call, Captured, Node, Source

__all__ = ["forget", "recognise", "recognise_calls", "remember", "remember_calls", "sources_of"]

# From the roots: the calls in program order, the inputs, the constants and all captured tensors;
# None where it is another program.
Matcher = Callable[[Sequence[Node]], "tuple[list[Call], list[Any], list[Any], list[Any]] | None"]

_KNOWN: dict[Any, list[tuple[Program | None, Matcher]]] = {}
# Programs that end alike, and ends.
_LIMIT, _ENDINGS = 32, 1024
_MOST_CALLS = 20_000


def recognise(roots: Sequence[Node], target: Node | None) -> Bound | None:
    """The program behind the roots if it was remembered; else None."""
    found = _match(_key(roots, target), roots)
    if found is None:
        return None
    program, (calls, tensors, consts, captured) = found
    assert program is not None
    return Bound(program, tensors, calls, consts, list(roots), captured)


def recognise_calls(roots: Sequence[Node]) -> tuple[list[Call], list[Node]] | None:
    """The calls behind the roots, in program order, and their minibatches, if remembered."""
    found = _match((_key(roots, None), "calls"), roots)
    return found[1][:2] if found is not None else None


def _match(key: Any, roots: Sequence[Node]) -> Any:
    candidates = _KNOWN.get(key)
    if candidates is None:
        return None
    for place in range(len(candidates) - 1, -1, -1):
        program, match = candidates[place]
        found = match(roots)
        if found is not None:
            if place != len(candidates) - 1:
                candidates.append(candidates.pop(place))
            return program, found
    return None


def remember(bound: Bound, target: Node | None) -> bool:
    """Recognise this program from now on, unless settled values belong to it; whether it can be."""
    matcher = _Writer(bound.roots, bound.calls, bound.tensors).matcher()
    return matcher is not None and _keep(_key(bound.roots, target), bound.program, matcher)


def remember_calls(roots: Sequence[Node], calls: Sequence[Call]) -> bool:
    """Recognise these calls from now on, unless settled values belong to them."""
    matcher = _Writer(roots, calls, sources_of(calls)).matcher()
    return matcher is not None and _keep((_key(roots, None), "calls"), None, matcher)


def sources_of(calls: Sequence[Call]) -> list[Node]:
    """A value of each wrapped minibatch behind some calls."""
    inputs = (x for call in calls for x in call.inputs if type(x) is Node)
    return list({(id(x.call), x.index): x for x in inputs if type(x.call) is Source}.values())


def _keep(key: Any, program: Program | None, matcher: Matcher) -> bool:
    if len(_KNOWN) >= _ENDINGS and key not in _KNOWN:
        # Minibatches of ever new sizes must not fill the memory.
        _KNOWN.clear()
    candidates = _KNOWN.setdefault(key, [])
    if len(candidates) >= _LIMIT:
        del candidates[0]
    candidates.append((program, matcher))
    return True


def forget() -> None:
    _KNOWN.clear()


def _key(roots: Sequence[Node], target: Node | None) -> Any:
    first = roots[0].call
    kind = first.info if isinstance(first, Call) else None
    aim = next((k for k, root in enumerate(roots) if root is target), -1)
    return (id(kind), len(roots), aim)


class _Writer:
    """Writes a matcher for the calls behind some roots."""

    def __init__(
        self, roots: Sequence[Node], calls: Sequence[Call], tensors: Sequence[Any]
    ) -> None:
        self.roots, self.calls, self.tensors = roots, calls, tensors
        self.order = {id(call): k for k, call in enumerate(calls)}
        self.lines: list[str] = []
        self.names: dict[str, Any] = {"Call": Call, "Source": Source}
        # The first meeting of each call, source and captured tensor, by what it is.
        self.met: dict[Any, str] = {}
        self.captured: list[str] = []
        self.todo: list[tuple[str, Call]] = []
        self.distinct: dict[str, list[str]] = {"source": [], "captured": []}

    def matcher(self) -> Matcher | None:
        if len(self.calls) > _MOST_CALLS:
            return None
        # What the code compares with must not be collected, or its identity may come again.
        self.names["infos"] = [call.info for call in self.calls]
        for k, root in enumerate(self.roots):
            if not isinstance(root.call, Call):
                return None
            self.lines.append(f"r{k} = roots[{k}]")
            if not self.node(f"r{k}", root):
                return None
        while self.todo:
            name, call = self.todo.pop()
            if not self.inputs(name, call):
                return None
        return self.ending()

    def check(self, condition: str) -> None:
        self.lines.append(f"if {condition}: return None")

    def node(self, name: str, x: Node) -> bool:
        """A recorded value: its call is of the known kind, or the one met before."""
        if x.attached is not None or x.value is not None:
            return False
        call = x.call
        assert isinstance(call, Call)
        self.check(f"{name}.attached is not None or {name}.value is not None")
        if len(call.info.metas) > 1:
            self.check(f"{name}.index != {x.index}")
        number = self.order[id(call)]
        if id(call) in self.met:
            self.check(f"{name}.call is not c{number}")
            return True
        self.met[id(call)] = f"c{number}"
        self.names[f"i{number}"] = call.info
        self.lines.append(f"c{number} = {name}.call")
        self.check(f"type(c{number}) is not Call or c{number}.info is not i{number}"
                   f" or c{number}.grad is not {call.grad}")  # fmt: skip
        self.todo.append((f"c{number}", call))
        return True

    def inputs(self, name: str, call: Call) -> bool:
        if not call.inputs:
            return True
        held = [f"{name}_{k}" for k in range(len(call.inputs))]
        self.lines.append(f"{', '.join(held)}, = {name}.inputs")
        checked = not getattr(call.info.func, "unchecked", False)
        for part, x in zip(held, call.inputs, strict=True):
            if isinstance(x, Captured):
                self.outside(f"{part}.tensor", (id(x.tensor), x.requires_grad), part, "captured")
                if checked:
                    self.captured.append(f"({part}, {name})")
            elif isinstance(x.call, Source):
                if x.attached is not None:
                    return False
                self.check(f"{part}.attached is not None or type({part}.call) is not Source")
                self.outside(f"{part}.call", (id(x.call), x.index), part, "source")
            elif not self.node(part, x):
                return False
        return True

    def outside(self, identity: str, key: Any, name: str, kind: str) -> None:
        """A tensor from outside: the same one wherever it was, and another elsewhere."""
        first = self.met.get(key)
        if first is None:
            self.met[key] = name
            self.lines.append(f"{name}_is = {identity}")
            self.distinct[kind].append(f"{name}_is")
        else:
            self.check(f"{identity} is not {first}_is")

    def ending(self) -> Matcher | None:
        tensors: list[str] = []
        for x in self.tensors:
            key = (id(x.tensor), x.requires_grad) if isinstance(x, Captured) else None
            key = key or (id(x.call), x.index)
            tensors.append(self.met[key])
        for kind, names in self.distinct.items():
            known = {k for k, name in self.met.items() if f"{name}_is" in names}
            if len({k[0] for k in known}) != len(names):
                # One tensor with and without gradients.
                return None
            if kind and len(names) > 1:
                every = ", ".join(f"id({name})" for name in names)
                self.check(f"len({{{every}}}) != {len(names)}")
        calls = [f"c{k}" for k in range(len(self.calls))]
        if len(calls) > 1:
            rising = " < ".join(f"{call}.sequence" for call in calls)
            self.check(f"not ({rising})")
        consts = ", ".join(f"*c{k}.consts" for k, call in enumerate(self.calls) if call.consts)
        listed = (", ".join(calls), ", ".join(tensors), consts, ", ".join(self.captured))
        self.lines.append("return " + ", ".join(f"[{x}]" for x in listed))
        source = "def match(roots):\n" + "\n".join(f"    {line}" for line in self.lines)
        exec(compile(source, "<koila_rl program>", "exec"), self.names)
        match: Matcher = self.names["match"]
        return match
