"""Carry layouts through the operators of one call, and write the steps that replay it.

Works on two traces of the same call, at minibatch sizes n and n2, after the fact: rules
see the shapes of both. The result is a list of `Step`: what to run on each microbatch, what
to add up, what to run once on whole values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
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
    find_rule,
    holds,
)
from koila_rl.recording.sizes import batch_shape
from koila_rl.recording.steps import (
    EFFECTS,
    CannotExplode,
    Step,
    draws,
    functional,
    paths_of,
    template_of,
)
from koila_rl.recording.template import Ref
from koila_rl.recording.trace import OpRecord, trace

__all__ = ["EFFECTS", "CannotExplode", "Propagation", "Step", "paths_of"]

_UNIFORM = {"zeros", "ones", "full", "empty"}
_COPIES = {"clone", "_conj", "_neg_view", "conj_physical"}


class Propagation:
    """Layouts of the values of one call, and its steps so far.

    ``plain`` stays true while every operator keeps its samples apart with operands as they
    came, possibly adding them up at the very end: then the call can run on a microbatch just
    as it was written. ``blocked`` says why it cannot be replayed operator by operator. With
    ``native`` it never is, so what it makes itself, as a state of zeros, follows the microbatch.
    """

    def __init__(self, n: int, n2: int, native: bool = False) -> None:
        self.n, self.n2, self.native = n, n2, native
        self.values: dict[int, int] = {}
        self.layouts: dict[int, Layout | None] = {}
        # Values whose batch axis is another than the minibatch's: its size at both sizes.
        self.axes: dict[int, tuple[int, int]] = {}
        self.row_numbers: dict[tuple[int, int], int] = {}
        # Copies made below autograd, as of a conjugate, do not say that they carry gradients.
        self.grads: set[int] = set()
        # Values ``0, step, 2 * step, ...`` made inside the call.
        self.strides: dict[int, int] = {}
        self.row_index: set[int] = set()
        self.storages: dict[int, set[int]] = {}
        self.alive: list[Tensor] = []
        self.steps: list[Step] = []
        self.wanted: set[int] = set()
        self.input_uses: dict[int, Use] = {}
        self.inputs = 0
        self.count = 0
        self.plain = True
        self.varies = False
        self.blocked: str | None = None
        self.reduction: Reduction | None = None

    def declare(self, a: Tensor, b: Tensor, layout: Layout | None, rows: bool = False) -> None:
        """An input of the call."""
        self.fresh(a, b, layout)
        self.inputs = self.count
        if rows:
            self.row_index.add(id(a))

    def fresh(
        self, a: Tensor, b: Tensor, layout: Layout | None, axis: tuple[int, int] | None = None
    ) -> None:
        """A new value, or a new version of one that was written."""
        self.axes.pop(id(a), None)
        if layout is not None and axis not in (None, (self.n, self.n2)):
            assert axis is not None
            self.axes[id(a)] = axis
        self.values[id(a)] = self.count
        self.count += 1
        self.alive += [a, b]
        self.layouts[id(a)] = layout
        if a.requires_grad:
            self.grads.add(id(a))
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
                    self.outside(x, y)
                rows = id(x) in self.row_index
                layout = self.layouts[id(x)]
                operands.append(Operand(name, tuple(x.shape), tuple(y.shape), layout, rows, x))
        n, n2 = self.common_axis(operands)
        namespace, _, name = schema.name.partition("::")
        base = name[:-1] if name.endswith("_") and namespace == "aten" else name
        return Op(
            base.removesuffix("_copy") if base != "_to_copy" else base, a.func, args, operands,
            [tuple(x.shape) for x in a.outs], [tuple(x.shape) for x in b.outs], n, n2,
        )  # fmt: skip

    def outside(self, x: Tensor, y: Tensor) -> None:
        """A tensor made inside the call: right for any microbatch if it does not follow N."""
        one, two = getattr(x, "constant", None), getattr(y, "constant", None)
        if tuple(x.shape) != tuple(y.shape):
            raise CannotExplode("a value from outside")
        if one is None or two is None or not torch.equal(one, two):
            raise CannotExplode("a constant from outside")
        self.fresh(x, y, None)
        self.blocked = "a constant from outside"

    def common_axis(self, operands: list[Operand]) -> tuple[int, int]:
        """The axis along which the operator is cut; operands of another are taken whole."""
        main = (self.n, self.n2)
        batched = [o for o in operands if o.layout is not None]
        axes = [self.axes.get(id(o.tensor), main) for o in batched]
        # An axis of the same size at both minibatch sizes tells nothing about what follows it.
        usable = [axis for axis in axes if axis[0] != axis[1]]
        chosen = max(usable, default=main)
        for operand, axis in zip(batched, axes, strict=True):
            if axis != chosen:
                operand.layout = None
        return chosen

    def judge(self, op: Op) -> Verdict | None:
        """The rule's verdict, with as many operands batched as it allows; None: run whole."""
        batched = op.batched
        if not batched:
            return None
        rule = find_rule(op.func)
        if rule is None:
            return None
        if op.name.startswith("_embedding_bag"):
            op.args["__step"] = self.strides.get(id(op.operands[2].tensor))
        if "index_put" in op.name:
            op.args["__lookup_shape"] = self.lookup_shape(op)
        kept = [operand.layout for operand in op.operands]
        for trial in self.trials(op):
            for k, operand in enumerate(op.operands):
                operand.layout = trial.get(k)
            verdict = rule(op)
            if verdict is not None and holds(op, verdict):
                return verdict
        for k, operand in enumerate(op.operands):
            operand.layout = kept[k]
        return None

    def trials(self, op: Op) -> Iterator[dict[int, Layout | None]]:
        """Which operands to cut: all that are batched, those that follow the minibatch too, one."""
        batched: dict[int, Layout | None] = {k: op.operands[k].layout for k in op.batched}
        yield batched
        lent: dict[int, Layout | None] = {
            k: layout
            for k, operand in enumerate(op.operands)
            if operand.layout is None
            and (layout := scaled_layout(operand.shape, operand.shape2, op.n, op.n2))
        }
        if lent:
            yield batched | lent
        if len(batched) > 1 or lent:
            single = batched | lent
            for k in sorted(single, key=lambda k: (k in lent, -op.operands[k].tensor.nbytes)):
                yield {k: single[k]}

    def lookup_shape(self, op: Op) -> tuple[int, ...]:
        from koila_rl.recording.trace import fakes

        indices = [index if index is not None else slice(None) for index in op["indices"]]
        if any(isinstance(i, Tensor) and i.dtype in (torch.bool, torch.uint8) for i in indices):
            return ()
        with fakes(), torch.no_grad():
            return tuple(op.operands[0].tensor[tuple(indices)].shape)

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
            self.axes.pop(id(old), None)
            if id(x) in self.axes:
                self.axes[id(old)] = self.axes[id(x)]

    def emit(self, op: Op, a: OpRecord, b: OpRecord, verdict: Verdict | None) -> None:
        """Write the step of one operator and declare its results."""
        uses = [
            verdict.uses.get(k, WHOLE) if verdict is not None else WHOLE
            for k in range(len(op.operands))
        ]
        kind = "global" if verdict is None else "reduce" if verdict.reduction else "split"
        layouts = self.out_layouts(op, verdict)
        axis = (op.n, op.n2) if verdict is None or verdict.axis is None else verdict.axis
        if verdict is None:
            axis = (self.n, self.n2)
        operands = tuple(
            (self.values[id(operand.tensor)], use)
            for operand, use in zip(op.operands, uses, strict=True)
        )
        self.note_plain(op, uses, kind, verdict)
        first = layouts[0] if layouts and kind == "split" else None
        as_written = verdict is None or verdict.instead is None
        template, numbers = template_of(op, a, b, first, kind == "global", as_written)
        func = self.written(a, layouts)
        if verdict is not None and verdict.instead is not None:
            func = verdict.instead
            operands = (*operands, (self.numbered(axis), Use(Layout(0))))
            template = ((Ref(len(operands) - 1), *template[0]), template[1])
            self.plain = False
        if verdict is not None and verdict.native:
            self.blocked = f"{op.name} by itself"
        if numbers or axis != (self.n, self.n2):
            # A number that depends on the minibatch size is right as it is at full size.
            self.plain, self.varies = False, True
        outs = a.outs
        for x, y, layout in zip(outs, b.outs, layouts, strict=True):
            self.fresh(x, y, layout, axis)
            if op.name in _COPIES and id(op.operands[0].tensor) in self.grads:
                self.grads.add(id(x))
        self.note_rows(op, outs, kind)
        self.steps.append(
            Step(
                kind=kind, func=func, template=template, operands=operands,
                outputs=tuple(self.values[id(x)] for x in outs),
                paths=tuple(paths_of(a.out)), layouts=tuple(layouts),
                requires_grad=tuple(id(x) in self.grads for x in outs),
                metas=tuple((tuple(x.shape), x.dtype, x.device) for x in outs), name=op.name,
                reduction=None if verdict is None else verdict.reduction,
                random=draws(a),
                n=None if axis == (self.n, self.n2) else axis[0], autocast=False,
                bytes_per_sample=sum(x.nbytes for x in outs) // max(self.n, 1),
                ops=((op.name, tuple(range(len(operands))),
                      tuple(range(len(operands), len(operands) + len(outs)))),),
            )
        )  # fmt: skip

    def numbered(self, axis: tuple[int, int]) -> int:
        """The value number of ``arange(axis)``, which steps that need their row numbers take."""
        known = self.row_numbers.get(axis)
        if known is not None:
            return known
        number = self.row_numbers[axis] = self.count
        self.count += 1
        size: Any = axis[0] if axis != (self.n, self.n2) else batch_shape(self.n)
        meta = ((axis[0],), torch.int64, torch.device("cpu"))
        self.steps.append(
            Step(
                kind="global", func=torch.arange, template=((size,), {}), operands=(),
                outputs=(number,), paths=((),), layouts=(Layout(0),), requires_grad=(False,),
                metas=(meta,), name="arange", autocast=False,
            )
        )  # fmt: skip
        return number

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
            elif use.row_index or use.layout != self.layouts[id(operand.tensor)]:
                self.plain = False

    def note_rows(self, op: Op, outs: list[Tensor], kind: str) -> None:
        """Follow the row index ``0..N-1`` through its creation, views and casts."""
        if kind != "global":
            return
        if op.name == "arange" and not op["start"] and outs[0].shape[0] == self.n != op.outs2[0][0]:
            self.strides[id(outs[0])] = op["step"] or 1
            if op["step"] in (None, 1):
                self.row_index.add(id(outs[0]))
        views = ("view", "unsqueeze", "_to_copy", "detach", "alias", "expand")
        if op.name in views and op.operands:
            origin = op.operands[0]
            if origin.row_index:
                self.row_index.add(id(outs[0]))
            if id(origin.tensor) in self.strides:
                self.strides[id(outs[0])] = self.strides[id(origin.tensor)]

    def out_layouts(self, op: Op, verdict: Verdict | None) -> list[Layout | None]:
        if verdict is None:
            if not op.batched:
                if self.native and op.name in _UNIFORM:
                    return [self.rows_made(op.outs[0], op.outs2[0])]
                return [None] * len(op.outs)
            return [
                scaled_layout(shape, shape2, self.n, self.n2)
                for shape, shape2 in zip(op.outs, op.outs2, strict=True)
            ]
        if verdict.reduction is not None:
            return [None] * len(op.outs)
        return list(verdict.outs)

    def rows_made(self, shape: tuple[int, ...], shape2: tuple[int, ...]) -> Layout | None:
        """The layout of equal rows, if one dimension alone follows the minibatch."""
        one = sum(a != b for a, b in zip(shape, shape2, strict=True)) == 1
        return scaled_layout(shape, shape2, self.n, self.n2) if one else None
