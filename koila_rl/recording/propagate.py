"""Carry layouts through the operators of one call, and write the steps that replay it.

Works on two traces of the same call, at minibatch sizes n and n2, after the fact: rules
see the shapes of both. The result is a list of `Step`: what to run on each microbatch, what
to add up, what to run once on whole values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from koila_rl.recording.layouts import Layout, scaled_layout
from koila_rl.recording.rules import (
    WHOLE,
    Op,
    Operand,
    Reduction,
    Use,
    Verdict,
    axis_size,
    find_rule,
)
from koila_rl.recording.sizes import BatchInt
from koila_rl.recording.template import Ref
from koila_rl.recording.trace import OpRecord, trace

__all__ = ["EFFECTS", "CannotExplode", "Propagation", "Step"]


# Operators that stand for a write outside the program, and what the engine runs for them.
EFFECTS: dict[Any, Any] = {}


class CannotExplode(Exception):
    """The call cannot be replayed operator by operator."""


@dataclass(slots=True)
class Step:
    """One replayed operation.

    ``kind``: "split" runs on each microbatch, "reduce" too and its results are added up,
    "global" runs once on whole values. ``operands`` are value numbers and how each is taken;
    ``outputs`` are value numbers, in the order of the tensors in the returned structure.
    """

    kind: str
    func: Any
    template: tuple[Any, Any]
    operands: tuple[tuple[int, Use], ...]
    outputs: tuple[int, ...]
    paths: tuple[tuple[Any, ...], ...]
    layouts: tuple[Layout | None, ...]
    requires_grad: tuple[bool, ...]
    # Shape, type and device of each output at full size.
    metas: tuple[tuple[Any, torch.dtype, torch.device], ...]
    name: str
    reduction: Reduction | None = None
    random: bool = False
    # None: as recorded. False: the casts of autocast are already written out.
    autocast: bool | None = None
    bytes_per_sample: int = 0
    # Its aten operators, operands numbered first and outputs next, for the test of linearity.
    ops: tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...] = ()


def paths_of(tree: Any) -> list[tuple[Any, ...]]:
    """The index path of every tensor in a nested structure of results."""
    if isinstance(tree, Tensor):
        return [()]
    found: list[tuple[Any, ...]] = []
    items: Any = ()
    if isinstance(tree, tuple | list):
        items = enumerate(tree)
    elif isinstance(tree, dict):
        items = tree.items()
    for key, item in items:
        found += [(key, *rest) for rest in paths_of(item)]
    return found


def functional(func: Any) -> Any:
    """The operator that returns what an in-place one writes."""
    name = func._schema.name.partition("::")[2]
    packet = getattr(torch.ops.aten, name[:-1], None)
    overload = getattr(packet, func._overloadname, None) if packet is not None else None
    if overload is None and packet is not None and func._overloadname == "default":
        overload = getattr(packet, packet.overloads()[0])
    if overload is None:
        raise CannotExplode(f"no functional form of {func}")
    return overload


class Propagation:
    """Layouts of the values of one call, and its steps so far.

    ``plain`` stays true while every operator keeps its samples apart with operands as they
    came, possibly adding them up at the very end: then the call can run on a microbatch just
    as it was written. ``blocked`` says why it cannot be replayed operator by operator.
    """

    def __init__(self, n: int, n2: int) -> None:
        self.n, self.n2 = n, n2
        self.values: dict[int, int] = {}
        self.layouts: dict[int, Layout | None] = {}
        self.row_index: set[int] = set()
        self.storages: dict[int, set[int]] = {}
        self.alive: list[Tensor] = []
        self.steps: list[Step] = []
        self.wanted: set[int] = set()
        self.input_uses: dict[int, Use] = {}
        self.inputs = 0
        self.count = 0
        self.plain = True
        self.blocked: str | None = None
        self.reduction: Reduction | None = None

    def declare(self, a: Tensor, b: Tensor, layout: Layout | None, rows: bool = False) -> None:
        """An input of the call."""
        self.fresh(a, b, layout)
        self.inputs = self.count
        if rows:
            self.row_index.add(id(a))

    def fresh(self, a: Tensor, b: Tensor, layout: Layout | None) -> None:
        """A new value, or a new version of one that was written."""
        self.values[id(a)] = self.count
        self.count += 1
        self.alive += [a, b]
        self.layouts[id(a)] = layout
        self.storages.setdefault(a.untyped_storage()._cdata, set()).add(id(a))

    def run(self, first: Sequence[OpRecord], second: Sequence[OpRecord]) -> None:
        if len(first) != len(second):
            raise CannotExplode("another course at another minibatch size")
        used = {id(leaf) for record in first for leaf in tree_leaves((record.args, record.kwargs))}
        for a, b in zip(first, second, strict=True):
            if a.func is not b.func:
                raise CannotExplode("another course at another minibatch size")
            bookkeeping = a.func is torch.ops.aten.detach.default and id(a.out) not in used
            if not bookkeeping or id(a.out) in self.wanted:
                self.operator(a, b)

    def operator(self, a: OpRecord, b: OpRecord) -> None:
        op = self.describe(a, b)
        verdict = self.judge(op)
        if verdict is not None and verdict.decomposition is not None:
            self.decompose(a, b, verdict.decomposition)
        else:
            self.emit(op, a, b, verdict)

    def describe(self, a: OpRecord, b: OpRecord) -> Op:
        schema = a.func._schema
        names = [argument.name for argument in schema.arguments]
        args = dict(zip(names, a.args, strict=False))
        args.update(a.kwargs)
        for argument in schema.arguments:
            if argument.name not in args and argument.has_default_value():
                args[argument.name] = argument.default_value
        args2 = dict(zip(names, b.args, strict=False))
        args2.update(b.kwargs)
        operands = []
        for name in [name for name in names if name in args]:
            leaves = [x for x in tree_leaves(args[name]) if isinstance(x, Tensor)]
            leaves2 = [x for x in tree_leaves(args2.get(name)) if isinstance(x, Tensor)]
            for x, y in zip(leaves, leaves2, strict=True):
                if id(x) not in self.values:
                    if tuple(x.shape) != tuple(y.shape):
                        raise CannotExplode("a value from outside")
                    raise CannotExplode("a constant from outside")
                operands.append(
                    Operand(
                        name,
                        tuple(x.shape),
                        tuple(y.shape),
                        self.layouts[id(x)],
                        id(x) in self.row_index,
                        x,
                    )  # fmt: skip
                )
        namespace, _, name = schema.name.partition("::")
        base = name[:-1] if name.endswith("_") and namespace == "aten" else name
        return Op(
            base.removesuffix("_copy") if base != "_to_copy" else base, a.func, args, operands,
            [tuple(x.shape) for x in a.outs], [tuple(x.shape) for x in b.outs], self.n, self.n2,
        )  # fmt: skip

    def judge(self, op: Op) -> Verdict | None:
        """The rule's verdict, with as many operands batched as it allows; None: run whole."""
        batched = op.batched
        if not batched:
            return None
        rule = find_rule(op.func)
        if rule is None:
            return None
        if "index_put" in op.name:
            op.args["__lookup_shape"] = self.lookup_shape(op)
        kept = [operand.layout for operand in op.operands]
        trials: list[list[int]] = [batched]
        if len(batched) > 1:
            by_bytes = sorted(batched, key=lambda k: -op.operands[k].tensor.nbytes)
            trials += [[k] for k in by_bytes]
        for trial in trials:
            for k, operand in enumerate(op.operands):
                operand.layout = kept[k] if k in trial else None
            verdict = rule(op)
            if verdict is not None and self.holds(op, verdict):
                return verdict
        for k, operand in enumerate(op.operands):
            operand.layout = kept[k]
        return None

    def lookup_shape(self, op: Op) -> tuple[int, ...]:
        from koila_rl.recording.trace import fakes

        indices = [index if index is not None else slice(None) for index in op["indices"]]
        if any(isinstance(i, Tensor) and i.dtype in (torch.bool, torch.uint8) for i in indices):
            return ()
        with fakes(), torch.no_grad():
            return tuple(op.operands[0].tensor[tuple(indices)].shape)

    def holds(self, op: Op, verdict: Verdict) -> bool:
        """Whether shapes at both sizes follow the layouts that the rule claims."""
        if verdict.decomposition is not None:
            return True
        for k, use in verdict.uses.items():
            operand = op.operands[k]
            if use.layout is not None and not self.follows(
                operand.shape, operand.shape2, use.layout
            ):
                return False
        if verdict.reduction is not None:
            return op.outs == op.outs2
        for shape, shape2, layout in zip(op.outs, op.outs2, verdict.outs, strict=True):
            if layout is None:
                if shape != shape2:
                    return False
            elif not self.follows(shape, shape2, layout):
                return False
        return not (verdict.outs and all(layout is None for layout in verdict.outs))

    def follows(self, shape: tuple[int, ...], shape2: tuple[int, ...], layout: Layout) -> bool:
        return (
            layout.dim < len(shape)
            and shape[layout.dim] == axis_size(layout, self.n)
            and shape2[layout.dim] == axis_size(layout, self.n2)
        )

    def decompose(self, a: OpRecord, b: OpRecord, instead: Callable[..., Any]) -> None:
        """Run other operators for this one; its results take the numbers of the old ones."""
        self.plain = False
        first = trace(lambda: instead(*a.args, **a.kwargs))
        second = trace(lambda: instead(*b.args, **b.kwargs))
        keep = self.wanted
        self.wanted = keep | {id(leaf) for leaf in tree_leaves(first.out)}
        self.run(first.records, second.records)
        self.wanted = keep
        new = [leaf for leaf in tree_leaves(first.out) if isinstance(leaf, Tensor)]
        for old, other, x in zip(a.outs, b.outs, new, strict=False):
            if tuple(old.shape) != tuple(x.shape) or id(x) not in self.values:
                raise CannotExplode("a decomposition of another shape")
            self.alive += [old, other, x]
            self.values[id(old)] = self.values[id(x)]
            self.layouts[id(old)] = self.layouts[id(x)]

    def emit(self, op: Op, a: OpRecord, b: OpRecord, verdict: Verdict | None) -> None:
        """Write the step of one operator and declare its results."""
        uses = [
            verdict.uses.get(k, WHOLE) if verdict is not None else WHOLE
            for k in range(len(op.operands))
        ]
        kind = "global" if verdict is None else "reduce" if verdict.reduction else "split"
        layouts = self.out_layouts(op, verdict)
        operands = tuple(
            (self.values[id(operand.tensor)], use)
            for operand, use in zip(op.operands, uses, strict=True)
        )
        self.note_plain(op, uses, kind, verdict)
        template = self.template(op, a, b)
        func = self.written(a, layouts)
        outs = a.outs
        for x, y, layout in zip(outs, b.outs, layouts, strict=True):
            self.fresh(x, y, layout)
        self.note_rows(op, outs, kind)
        self.steps.append(
            Step(
                kind=kind, func=func, template=template, operands=operands,
                outputs=tuple(self.values[id(x)] for x in outs),
                paths=tuple(paths_of(a.out)), layouts=tuple(layouts),
                requires_grad=tuple(x.requires_grad for x in outs),
                metas=tuple((tuple(x.shape), x.dtype, x.device) for x in outs), name=op.name,
                reduction=None if verdict is None else verdict.reduction,
                random=torch.Tag.nondeterministic_seeded in a.func.tags, autocast=False,
                bytes_per_sample=sum(x.nbytes for x in outs) // max(self.n, 1),
                ops=((op.name, tuple(range(len(operands))),
                      tuple(range(len(operands), len(operands) + len(outs)))),),
            )
        )  # fmt: skip

    def written(self, a: OpRecord, layouts: list[Layout | None]) -> Any:
        """The operator to replay: for one that writes, the form that returns the result."""
        schema = a.func._schema
        targets = [
            x
            for argument, x in zip(schema.arguments, a.args, strict=False)
            if argument.alias_info is not None
            and argument.alias_info.is_write
            and isinstance(x, Tensor)
        ]
        if not targets:
            return EFFECTS.get(a.func, a.func)
        if torch.Tag.inplace_view in a.func.tags:
            # ``transpose_`` and its like change the view, not the data.
            return functional(a.func)
        target = targets[0]
        if len(targets) > 1 or a.out is not target:
            self.blocked = "an operator that writes beside its result"
        elif len(self.storages[target.untyped_storage()._cdata]) > 1:
            self.blocked = "a write to a value that has views"
        if self.layouts[id(target)] != layouts[0]:
            self.plain, self.blocked = False, "a write that moves the batch axis"
        try:
            return functional(a.func)
        except CannotExplode as reason:
            self.blocked = str(reason)
            return a.func

    def note_plain(self, op: Op, uses: list[Use], kind: str, verdict: Verdict | None) -> None:
        """Whether the whole call may still run on a microbatch just as it was written."""
        if self.reduction is not None or (kind == "global" and op.batched):
            self.plain = False
        if verdict is not None and verdict.reduction is not None:
            self.reduction = verdict.reduction
        for operand, use in zip(op.operands, uses, strict=True):
            number = self.values[id(operand.tensor)]
            if number < self.inputs:
                if self.input_uses.setdefault(number, use) != use:
                    self.plain = False
            elif use.row_index or use.layout != operand.layout:
                self.plain = False

    def note_rows(self, op: Op, outs: list[Tensor], kind: str) -> None:
        """Follow the row index ``0..N-1`` through its creation, views and casts."""
        if kind != "global":
            return
        if op.name == "arange" and outs[0].shape[0] == self.n != op.outs2[0][0]:
            if not op.args.get("start") and op.args.get("step") in (None, 1):
                self.row_index.add(id(outs[0]))
        elif op.name in ("view", "unsqueeze", "_to_copy", "detach", "alias", "expand"):
            if op.operands and op.operands[0].row_index:
                self.row_index.add(id(outs[0]))

    def out_layouts(self, op: Op, verdict: Verdict | None) -> list[Layout | None]:
        if verdict is None:
            if not op.batched:
                return [None] * len(op.outs)
            return [
                scaled_layout(shape, shape2, self.n, self.n2)
                for shape, shape2 in zip(op.outs, op.outs2, strict=True)
            ]
        if verdict.reduction is not None:
            return [None] * len(op.outs)
        return list(verdict.outs)

    def template(self, op: Op, a: OpRecord, b: OpRecord) -> tuple[Any, Any]:
        """Arguments with holes; shape integers that follow the minibatch become sizes."""
        schema = {argument.name: argument for argument in a.func._schema.arguments}
        positional = list(schema)
        counter = iter(range(len(op.operands)))

        def convert(x: Any, y: Any, shape: bool) -> Any:
            if isinstance(x, Tensor):
                return Ref(next(counter))
            if isinstance(x, list | tuple):
                if not isinstance(y, list | tuple) or len(x) != len(y):
                    raise CannotExplode("arguments of another form")
                return type(x)(convert(i, j, shape) for i, j in zip(x, y, strict=True))
            if isinstance(x, int | float) and not isinstance(x, bool) and x != y:
                if shape and isinstance(x, int) and isinstance(y, int):
                    return self.size_of(x, y)
                # A number that depends on the minibatch size: right as it is at full size.
                self.plain = False
            return x

        def is_shape(name: str) -> bool:
            kind = str(schema[name].type)
            return "int" in kind.lower() or "arange" in op.name

        args = tuple(
            convert(x, y, is_shape(name))
            for name, x, y in zip(positional, a.args, b.args, strict=False)
        )
        order = [name for name in positional if name in a.kwargs]
        kwargs = {name: convert(a.kwargs[name], b.kwargs[name], is_shape(name)) for name in order}
        return args, kwargs

    def size_of(self, x: int, y: int) -> BatchInt:
        """The size ``c * n + d`` that is x at n and y at n2."""
        c, rest = divmod(y - x, self.n2 - self.n)
        d = x - c * self.n
        if rest:
            raise CannotExplode(f"a size that is {x} and {y}")
        return BatchInt(x, lambda n: c * n + d, f"({c}*n+{d})")
