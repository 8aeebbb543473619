"""Replay as generated code: straight lines over local variables, each freed after its last use.

The body of a stage is one Python function of the slices of its inputs. Freeing values as
early as the user's own code would gives eager PyTorch's peak, and no interpreter loop stands
between two operators.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.checkpoint import checkpoint

from koila_rl.recording.sizes import BatchInt
from koila_rl.recording.template import Const, Ref

if TYPE_CHECKING:
    from koila_rl.engine.cuts import ProgramStep
    from koila_rl.recording.values import Call, CallState

__all__ = ["Body", "Effects", "Randomness", "compile_stage", "compile_whole", "failed_call"]

Body = Callable[..., tuple[Any, ...]]
# Generated code by the name of its file, and what its lines belong to.
_FILE, _CALLS = "<koila_rl replay>", "__calls__"


class Randomness:
    """Random state by call and microbatch: saved in the first pass, replayed in later ones."""

    def __init__(self, states: Sequence[CallState | None], start: int, stop: int) -> None:
        self.states = states
        self.place = (start, stop)

    def run(self, call: int, step: int, function: Any, args: Any, kwargs: Any) -> Any:
        state = self.states[call]
        assert state is not None
        device = _random_device(args)
        key = (step, *self.place)
        saved = state.random.get(key)
        if saved is None:
            state.random[key] = _get_state(device)
            return function(*args, **kwargs)
        outside = _get_state(device)
        _set_state(device, saved)
        try:
            return function(*args, **kwargs)
        finally:
            _set_state(device, outside)


class Effects:
    """Steps that write to tensors outside the program run once, however often it is replayed."""

    def __init__(self, states: Sequence[CallState | None]) -> None:
        self.states = states

    def run(self, call: int, function: Any, *args: Any) -> Any:
        state = self.states[call]
        assert state is not None
        first, state.done = not state.done, True
        return function(*args, first=first)


def _random_device(args: Any) -> torch.device:
    for x in args:
        if isinstance(x, torch.Tensor):
            return x.device
        if isinstance(x, list | tuple):
            return _random_device(x)
    return torch.device("cpu")


def _get_state(device: torch.device) -> Any:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def _set_state(device: torch.device, state: Any) -> None:
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)


class _Writer:
    """Collects lines of code and the objects that they name."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        # The number of the call that each line belongs to; -1 for none.
        self.calls: list[int] = []
        self.names: dict[str, Any] = {"torch": torch}
        self.known: dict[int, str] = {}
        self.context: str | None = None
        self.indent = ""

    def open(self, head: str) -> None:
        """Begin a function inside the body."""
        self.lines.append(head)
        self.calls.append(-1)
        self.indent, self.context = "    ", None

    def close(self, given: Sequence[str], call: str, gone: Sequence[str]) -> None:
        """End the function, call it, and let go of what it was the last to use."""
        self.names["again"] = compute_again
        lines = ["    return (" + "".join(f"{v}, " for v in given) + ")"]
        lines.append(f"{''.join(f'{v}, ' for v in given)}= {call}" if given else call)
        gone = [ref for ref in gone if ref[0] in "vr"]
        lines += ["del " + ", ".join(gone)] if gone else []
        self.lines += lines
        self.calls += [-1] * len(lines)
        self.indent, self.context = "", None

    def hoist(self, value: Any) -> str:
        name = self.known.get(id(value))
        if name is None:
            name = self.known[id(value)] = f"k{len(self.known)}"
            self.names[name] = value
        return name

    def render(self, template: Any, refs: Sequence[str], offset: int) -> str:
        kind = type(template)
        if kind is Ref:
            ref: str = refs[template.k]
            return ref
        if kind is Const:
            return f"c[{offset + template.k}]"
        if kind is BatchInt:
            code: str = template.code
            return code
        if kind is list:
            return "[" + ", ".join(self.render(x, refs, offset) for x in template) + "]"
        if kind is tuple:
            items = [self.render(x, refs, offset) for x in template]
            return "(" + ", ".join(items) + ("," if len(items) == 1 else "") + ")"
        if kind is dict:
            items = [f"{k!r}: {self.render(v, refs, offset)}" for k, v in template.items()]
            return "{" + ", ".join(items) + "}"
        if kind is slice:
            parts = (template.start, template.stop, template.step)
            return "slice(" + ", ".join(self.render(x, refs, offset) for x in parts) + ")"
        if kind in (int, bool, str, type(None)):
            return repr(template)
        if isinstance(template, tuple):
            items = [self.render(x, refs, offset) for x in template]
            inner = ", ".join(items)
            call = f"({inner})" if hasattr(kind, "_fields") else f"([{inner}])"
            return self.hoist(kind) + call
        return self.hoist(template)

    def arguments(self, template: tuple[Any, Any], refs: Sequence[str], offset: int) -> str:
        args, kwargs = template
        items = [self.render(x, refs, offset) for x in args]
        items += [f"{name}={self.render(x, refs, offset)}" for name, x in kwargs.items()]
        return ", ".join(items)

    def finish(self, signature: str) -> Body:
        body = "\n".join(f"    {line}" for line in self.lines) or "    pass"
        source = f"def body({signature}):\n{body}\n"
        self.names[_CALLS] = (-1, *self.calls)
        exec(compile(source, _FILE, "exec"), self.names)
        function: Body = self.names["body"]
        return function


def _context(writer: _Writer, grad: bool, autocast: Any, default: Any) -> str | None:
    """The mode a step runs in, where it differs from gradients on and no autocast."""
    modes = [] if grad else ["torch.no_grad()"]
    if autocast is not None:
        writer.names["casting"] = casting
        modes.append(f"casting({writer.hoist(autocast)})")
    if default is not None:
        writer.names["defaulting"] = defaulting
        modes.append(f"defaulting({writer.hoist(default)})")
    return f"with {', '.join(modes)}:" if modes else None


@contextmanager
def defaulting(dtype: torch.dtype) -> Iterator[None]:
    """The default type as it was when the call was recorded: whole numbers divide into it."""
    before = torch.get_default_dtype()
    if before == dtype:
        yield
        return
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def casting(state: Any) -> Any:
    """Autocast as it was when the call was recorded: (cpu on, type, cuda on, type)."""
    cpu, cpu_type, cuda, cuda_type = state
    stack = ExitStack()
    if cpu:
        stack.enter_context(torch.autocast("cpu", dtype=cpu_type))
    if cuda:
        stack.enter_context(torch.autocast("cuda", dtype=cuda_type))
    return stack


def _emit(
    writer: _Writer,
    targets: Sequence[str],
    paths: Sequence[tuple[Any, ...]],
    call: str,
) -> list[str]:
    """Lines that run a call and take its tensors apart."""
    if not targets:
        return [call]
    if len(paths) == 1 and paths[0] == ():
        return [f"{targets[0]} = {call}"]
    lines = [f"t = {call}"]
    for target, path in zip(targets, paths, strict=True):
        lines.append(f"{target} = t" + "".join(f"[{key!r}]" for key in path))
    return [*lines, "del t"]


def _write_block(writer: _Writer, context: str | None, lines: list[str], call: int) -> None:
    """Add lines of a call under a context; neighbours under the same one share it."""
    if context is not None:
        lines = [f"    {line}" for line in lines]
        if writer.context != context:
            lines.insert(0, context)
    writer.lines += [writer.indent + line for line in lines]
    writer.calls += [call] * len(lines)
    writer.context = context


def failed_call(error: BaseException) -> int | None:
    """The number of the call at whose replay an error was raised; None if at none."""
    found = None
    trace = error.__traceback__
    while trace is not None:
        frame = trace.tb_frame
        if frame.f_code.co_filename == _FILE:
            calls = frame.f_globals[_CALLS]
            line = trace.tb_lineno - 1
            found = calls[line] if 0 <= line < len(calls) else None
        trace = trace.tb_next
    return found if found is None or found >= 0 else None


def compile_stage(
    steps: Sequence[ProgramStep],
    inputs: Sequence[int],
    outputs: Sequence[int],
    offsets: Sequence[int],
    names: Sequence[dict[int, Any]] | None = None,
    rows: int = 0,
    whole: int = 0,
    cuts: Sequence[int] = (),
) -> Body:
    """Code for a run of steps: ``body(n, c, rnd, effects, *inputs) -> outputs``.

    With ``names``, inputs are the slices of row inputs, then whole inputs, as the stage says;
    without, they are the values ``inputs``. With ``cuts``, numbers of steps, the parts between
    them keep nothing for the backward and are computed again there.
    """
    writer = _Writer()
    refs_of: list[list[str]] = []
    for number, step in enumerate(steps):
        if names is None:
            refs_of.append([f"v{v}" for v, _ in step.operands])
        else:
            refs_of.append([f"{names[number][k][0]}{names[number][k][1]}"
                            for k in range(len(step.operands))])  # fmt: skip
    kept = {f"v{v}" for v in outputs}
    last = {ref: number for number, refs in enumerate(refs_of) for ref in refs}
    ends = [*cuts, len(steps)]
    start = 0
    for part, end in enumerate(ends):
        made = [f"v{v}" for step in steps[start:end] for v in step.outputs]
        taken = dict.fromkeys(ref for refs in refs_of[start:end] for ref in refs if ref not in made)
        if cuts:
            writer.open(f"def part{part}({', '.join(taken)}):")
        for number in range(start, end):
            step = steps[number]
            targets = [f"v{v}" for v in step.outputs]
            lines = _step_lines(writer, step, number, refs_of[number], targets, offsets)
            if names is None:
                # Global steps see the whole minibatch.
                lines.insert(0, f"n = {step.n}")
            lines += _forget(refs_of[number], targets, last, kept, number)
            cast = step.autocast if step.step.autocast is None else None
            _write_block(writer, _context(writer, step.grad, cast, step.default), lines, step.call)
        if cuts:
            given = [v for v in dict.fromkeys(made) if v in kept or last.get(v, -1) >= end]
            gone = [ref for ref in taken if last[ref] < end and ref not in kept]
            writer.close(given, f"again(part{part}, {', '.join(taken)})", gone)
        start = end
    writer.lines.append("return (" + "".join(f"v{v}, " for v in outputs) + ")")
    if names is None:
        params = [f"v{v}" for v in inputs]
    else:
        params = [f"r{k}" for k in range(rows)] + [f"w{k}" for k in range(whole)]
    return writer.finish(", ".join(["n", "c", "rnd", "effects", *params]))


def _forget(
    refs: Sequence[str], targets: Sequence[str], last: dict[str, int], kept: set[str], number: int
) -> list[str]:
    """The line that lets go of what step ``number`` was the last to use."""
    dead = [ref for ref in dict.fromkeys(refs)
            if last[ref] == number and ref not in kept and ref[0] in "vr"]  # fmt: skip
    dead += [t for t in dict.fromkeys(targets) if t not in last and t not in kept]
    return ["del " + ", ".join(dead)] if dead else []


def compute_again(part: Callable[..., Any], *tensors: Any) -> Any:
    """``part(*tensors)``, which keeps only its inputs and runs once more in the backward."""
    if not torch.is_grad_enabled():
        return part(*tensors)
    # Random states are kept by call and microbatch already.
    return checkpoint(part, *tensors, use_reentrant=False, preserve_rng_state=False)


def _step_lines(
    writer: _Writer,
    step: ProgramStep,
    number: int,
    refs: list[str],
    targets: list[str],
    offsets: Sequence[int],
) -> list[str]:
    offset = offsets[step.call]
    function = writer.hoist(step.step.func)
    if step.step.random:
        args, kwargs = step.step.template
        items = writer.render(tuple(args), refs, offset)
        named = writer.render(dict(kwargs), refs, offset)
        call = f"rnd.run({step.call}, {number}, {function}, {items}, {named})"
    elif getattr(step.step.func, "effect", False):
        arguments = writer.arguments(step.step.template, refs, offset)
        call = f"effects.run({step.call}, {function}, {arguments})"
    else:
        call = f"{function}({writer.arguments(step.step.template, refs, offset)})"
    return _emit(writer, targets, step.step.paths, call)


def compile_whole(
    calls: Sequence[Call],
    args: Sequence[Sequence[int]],
    outs: Sequence[Sequence[int]],
    inputs: Sequence[int],
    roots: Sequence[int],
    offsets: Sequence[int],
) -> Body:
    """Code that runs the calls as they were written, on the whole minibatch."""
    writer = _Writer()
    kept = {f"v{v}" for v in roots}
    last = {f"v{v}": k for k, ins in enumerate(args) for v in ins}
    for k, (call, ins, results) in enumerate(zip(calls, args, outs, strict=True)):
        info = call.info
        refs = [f"v{v}" for v in ins]
        function = writer.hoist(getattr(info.func, "whole", info.func))
        size = str(info.n)
        arguments = writer.arguments(info.template, refs, offsets[k])
        if info.random:
            a, b = info.template
            items = writer.render(tuple(a), refs, offsets[k])
            named = writer.render(dict(b), refs, offsets[k])
            text = f"rnd.run({k}, -1, {function}, {items}, {named})"
        elif hasattr(info.func, "whole"):
            text = f"effects.run({k}, {function}, {arguments})"
        else:
            text = f"{function}({arguments})"
        lines = [f"n = {size}", *_emit(writer, [f"v{v}" for v in results], info.paths, text)]
        dead = [ref for ref in dict.fromkeys(refs) if last[ref] == k and ref not in kept]
        dead += [f"v{v}" for v in results if f"v{v}" not in last and f"v{v}" not in kept]
        if dead:
            lines.append("del " + ", ".join(dead))
        _write_block(writer, _context(writer, call.grad, info.autocast, info.default), lines, k)
    writer.lines.append("return (" + "".join(f"v{v}, " for v in roots) + ")")
    return writer.finish(", ".join(["n", "c", "rnd", "effects", *[f"v{v}" for v in inputs]]))
