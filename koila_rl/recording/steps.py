"""What replays a call: its steps, and how arguments of an operator become a template."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from koila_rl.recording.layouts import Layout
from koila_rl.recording.rules import Op, Reduction, Use
from koila_rl.recording.sizes import BatchInt
from koila_rl.recording.template import Ref
from koila_rl.recording.trace import OpRecord

__all__ = ["EFFECTS", "CannotExplode", "Step", "draws", "functional", "paths_of", "template_of"]

# Operators that stand for a write outside the program, and what the engine runs for them.
EFFECTS: dict[Any, Any] = {}


class CannotExplode(Exception):  # noqa: N818
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
    # Size of the axis that is cut, where it is not the minibatch size of the call.
    n: int | None = None
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


def draws(record: OpRecord) -> bool:
    """Whether an operator takes random numbers; attention without dropout takes none."""
    if torch.Tag.nondeterministic_seeded not in record.func.tags:
        return False
    names = [argument.name for argument in record.func._schema.arguments]
    given = dict(zip(names, record.args, strict=False)) | record.kwargs
    return "dropout_p" not in names or given.get("dropout_p", 0.0) != 0.0


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


# Arguments that say how many rows there are. Others, as the shift of a roll, are numbers.
_SIZES = {"size", "shape", "sizes", "end", "N", "split_size", "split_sizes"}


class Arguments:
    """Turns the arguments of an operator at two minibatch sizes into a template.

    Sizes that follow the minibatch become functions of it, where the step sees a microbatch:
    those of the dimension that is cut. All other numbers are right as they are at full size;
    ``numbers`` counts the ones that follow the minibatch all the same.
    """

    def __init__(self, op: Op, layout: Layout | None, whole: bool) -> None:
        self.op, self.layout, self.whole = op, layout, whole
        self.counter = iter(range(len(op.operands)))
        self.numbers = 0

    def convert(self, x: Any, y: Any, shape: bool, follows: bool) -> Any:
        if isinstance(x, Tensor):
            return Ref(next(self.counter))
        if isinstance(x, list | tuple):
            if not isinstance(y, list | tuple) or len(x) != len(y):
                raise CannotExplode("arguments of another form")
            aligned = self.layout is not None and self.op.outs and len(x) == len(self.op.outs[0])
            items = []
            for k, (i, j) in enumerate(zip(x, y, strict=True)):
                cut = not aligned or self.layout is None or k == self.layout.dim
                items.append(self.convert(i, j, shape, follows and cut))
            return type(x)(items)
        if isinstance(x, int | float) and not isinstance(x, bool) and x != y:
            if shape and isinstance(x, int) and isinstance(y, int):
                if self.whole:
                    return x
                if follows:
                    return size_of(x, y, self.op.n, self.op.n2)
            self.numbers += 1
        return x


def template_of(
    op: Op, a: OpRecord, b: OpRecord, layout: Layout | None, whole: bool, follows: bool = True
) -> tuple[tuple[Any, Any], bool]:
    """The arguments with holes, and whether a number among them follows the minibatch.

    ``layout`` is that of the first result of a step that sees microbatches; only there, and with
    ``follows``, do sizes become functions of the microbatch.
    """
    schema = {argument.name: argument for argument in a.func._schema.arguments}
    positional = list(schema)
    arguments = Arguments(op, layout, whole)
    dim = op.args.get("dim")
    along = follows
    if isinstance(dim, int) and layout is not None and op.outs and op.outs[0]:
        along = follows and dim % len(op.outs[0]) == layout.dim

    def convert(name: str, x: Any, y: Any) -> Any:
        is_shape = "int" in str(schema[name].type).lower() or "arange" in op.name
        return arguments.convert(x, y, is_shape, along and name in _SIZES)

    pairs = zip(positional, a.args, b.args, strict=False)
    args = tuple(convert(name, x, y) for name, x, y in pairs)
    order = [name for name in positional if name in a.kwargs]
    kwargs = {name: convert(name, a.kwargs[name], b.kwargs[name]) for name in order}
    return (args, kwargs), arguments.numbers > 0


def size_of(x: int, y: int, n: int, n2: int) -> BatchInt:
    """The size ``c * n + d`` that is x at n and y at n2."""
    if n == n2:
        raise CannotExplode(f"a size that is {x} and {y}")
    c, rest = divmod(y - x, n2 - n)
    d = x - c * n
    if rest:
        raise CannotExplode(f"a size that is {x} and {y}")
    return BatchInt(x, lambda size: c * size + d, f"({c}*n+{d})")
