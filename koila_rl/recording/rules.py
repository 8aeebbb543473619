"""What a layout rule sees and says, the registry of rules, and the rule of pointwise calls.

A rule looks at one aten operator: its arguments, the layout of each tensor among them, and
its output shapes at two minibatch sizes. It answers with a `Verdict`, or None where the
operator mixes samples. Operators without a rule mix: always right, never split.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from koila_rl.errors import ConfigurationError
from koila_rl.recording.layouts import Layout

__all__ = [
    "Op",
    "Operand",
    "Reduction",
    "Rule",
    "RuleError",
    "Use",
    "Verdict",
    "align",
    "find_rule",
    "holds",
    "pointwise",
    "register",
    "search",
    "split",
]


@dataclass(frozen=True, slots=True)
class Use:
    """How a step takes one tensor: rows of a layout, whole, or as the row index ``0..n-1``."""

    layout: Layout | None = None
    row_index: bool = False


WHOLE = Use()


@dataclass(frozen=True, slots=True)
class Reduction:
    """How the partial results of microbatches become the value of the whole minibatch.

    ``weight`` "sum" adds them, "mean" adds them weighted with n / N. ``combine`` takes the
    stacked partials, one function per output, where addition is not the operation.
    """

    weight: str = "sum"
    combine: Callable[[Tensor], Tensor] | None = None


@dataclass(frozen=True, slots=True)
class Verdict:
    """What one operator does with the batch axis.

    Exactly one of: ``outs`` (per sample: a layout for each output tensor), ``reduction``
    (summed away), ``decomposition`` (do this instead: a function of the same arguments).

    With ``instead``, each microbatch runs ``instead(rows, *args, **kwargs)`` in place of the
    operator, ``rows`` being the numbers of its rows. ``axis`` is the size of the results' batch
    axis at both minibatch sizes where it is another than the minibatch's, as in ``x[1:]``. With
    ``native`` only the call as it was written is right on a microbatch, not its operators.
    """

    outs: tuple[Layout | None, ...] = ()
    uses: dict[int, Use] = field(default_factory=dict)
    reduction: Reduction | None = None
    decomposition: Callable[..., Any] | None = None
    instead: Callable[..., Any] | None = None
    axis: tuple[int, int] | None = None
    native: bool = False


@dataclass(slots=True)
class Operand:
    """One tensor argument of an operator."""

    name: str
    shape: tuple[int, ...]
    shape2: tuple[int, ...]
    layout: Layout | None
    row_index: bool
    tensor: Tensor

    @property
    def ndim(self) -> int:
        return len(self.shape)


@dataclass(slots=True)
class Op:
    """One aten call at minibatch sizes ``n`` and ``n2``."""

    name: str
    func: Any
    args: dict[str, Any]
    operands: list[Operand]
    outs: list[tuple[int, ...]]
    outs2: list[tuple[int, ...]]
    n: int
    n2: int

    def __getitem__(self, name: str) -> Any:
        return self.args.get(name)

    @property
    def batched(self) -> list[int]:
        return [k for k, operand in enumerate(self.operands) if operand.layout is not None]

    def only(self, *names: str) -> bool:
        """Whether no operand but these is batched."""
        return all(operand.layout is None or operand.name in names for operand in self.operands)

    def index(self, name: str) -> int | None:
        for k, operand in enumerate(self.operands):
            if operand.name == name:
                return k
        return None

    def operand(self, name: str) -> Operand | None:
        k = self.index(name)
        return None if k is None else self.operands[k]


class RuleError(ConfigurationError):
    """A rule that a user gave says what the shapes of an operator's results contradict."""


Rule = Callable[[Op], "Verdict | None"]
_RULES: dict[str, Rule] = {}


def register(*names: str) -> Callable[[Rule], Rule]:
    """Register a rule for aten operators by base name, in-place variants included."""

    def add(rule: Rule) -> Rule:
        for name in names:
            _RULES[name] = rule
        return rule

    return add


def find_rule(func: Any) -> Rule | None:
    """The rule of an operator: by qualified name, by base name, then by its pointwise tag."""
    qualified = func._schema.name
    if qualified in _RULES:
        return _RULES[qualified]
    namespace, _, name = qualified.partition("::")
    if namespace in ("aten", "prims"):
        base = name[:-1] if name.endswith("_") and not name.endswith("__") else name
        for candidate in (name, base, base.removesuffix("_copy")):
            if candidate in _RULES:
                return _RULES[candidate]
    if torch.Tag.pointwise in func.tags:
        return pointwise
    return None


def axis_size(layout: Layout, n: int) -> int:
    return layout.outer * n * layout.inner


def holds(op: Op, verdict: Verdict) -> bool:
    """Whether shapes at both sizes follow the layouts that the rule claims."""
    if verdict.decomposition is not None:
        return True
    for k, use in verdict.uses.items():
        operand = op.operands[k]
        if use.layout is not None and not _follows(
            operand.shape, operand.shape2, use.layout, *verdict.axis or (op.n, op.n2)
        ):
            return False
    if verdict.reduction is not None:
        return op.outs == op.outs2
    axis = verdict.axis or (op.n, op.n2)
    for shape, shape2, layout in zip(op.outs, op.outs2, verdict.outs, strict=True):
        if layout is None:
            if shape != shape2:
                return False
        elif not _follows(shape, shape2, layout, *axis):
            return False
    return not (verdict.outs and all(layout is None for layout in verdict.outs))


def _follows(
    shape: tuple[int, ...], shape2: tuple[int, ...], layout: Layout, n: int, n2: int
) -> bool:
    return (
        layout.dim < len(shape)
        and shape[layout.dim] == axis_size(layout, n)
        and shape2[layout.dim] == axis_size(layout, n2)
    )


def split(op: Op, *outs: Layout | None, uses: dict[int, Use] | None = None) -> Verdict:
    """Per sample; operands not named in ``uses`` keep their layout or are taken whole."""
    complete = {k: Use(operand.layout) for k, operand in enumerate(op.operands)}
    complete.update(uses or {})
    padded = outs + (None,) * (len(op.outs) - len(outs))
    return Verdict(outs=padded, uses=complete)


def align(
    op: Op, ndim: int, among: Sequence[int] | None = None
) -> tuple[Layout, dict[int, Use]] | None:
    """Align operands by broadcasting from the right to ``ndim`` dimensions.

    Returns the layout of the broadcast value and how each operand is taken: batched ones must
    agree on place, outer and inner; whole ones of full size along the axis are cut along.
    """
    which = range(len(op.operands)) if among is None else among
    target: Layout | None = None
    for k in which:
        layout = op.operands[k].layout
        if layout is None:
            continue
        lifted = layout.at(layout.dim + ndim - op.operands[k].ndim)
        if target is not None and lifted != target:
            return None
        target = lifted
    if target is None:
        return None
    uses: dict[int, Use] = {}
    size = axis_size(target, op.n)
    for k in which:
        operand = op.operands[k]
        dim = target.dim - (ndim - operand.ndim)
        full = dim >= 0 and operand.shape[dim] == size
        if operand.layout is None and full and size == 1:
            full = False
        uses[k] = Use(target.at(dim)) if full else WHOLE
    return target, uses


def pointwise(op: Op) -> Verdict | None:
    """Each output element depends on the input elements at its place, by broadcasting."""
    if not op.outs:
        return None
    ndim = max((len(shape) for shape in op.outs), default=0)
    aligned = align(op, ndim)
    if aligned is None:
        return None
    target, uses = aligned
    size = axis_size(target, op.n)
    if any(len(shape) != ndim or shape[target.dim] != size for shape in op.outs):
        return None
    return Verdict(outs=(target,) * len(op.outs), uses=uses)


register(
    "_to_copy", "lift_fresh", "complex", "polar", "masked_fill", "copy", "fill", "zero",
    "zeros_like", "ones_like", "full_like", "empty_like", "rand_like", "randn_like",
    "randint_like", "isin_scalar", "floor_divide", "hardswish", "log_sigmoid_forward", "rsub",
    "rrelu_with_noise", "native_dropout", "bernoulli", "normal", "uniform", "exponential",
    "geometric", "cauchy", "log_normal", "random", "_conj", "_neg_view", "conj", "detach",
    "alias", "lift", "resolve_conj", "true_divide", "dropout", "hardswish_backward",
    "log_sigmoid_backward", "threshold_backward", "tanh_backward", "sigmoid_backward",
    "gelu_backward", "nan_to_num", "_fused_dropout", "_sigmoid_backward", "convert_element_type",
)(pointwise)  # fmt: skip


@register("log_sigmoid_forward")
def _log_sigmoid(op: Op) -> Verdict | None:
    """The second output is an empty buffer on some devices."""
    layout = op.operands[0].layout
    outs = [layout if shape == op.outs[0] else None for shape in op.outs]
    return split(op, *outs)


@register("where")
def _where(op: Op) -> Verdict | None:
    return pointwise(op) if len(op.operands) == 3 or op.outs else None


@register("isin")
def _isin(op: Op) -> Verdict | None:
    """Elements are looked up in the whole of the test elements."""
    elements = op.operand("elements")
    if elements is None or elements.layout is None or not op.only("elements"):
        return None
    return split(op, elements.layout)


def search(op: Op) -> Verdict | None:
    """Values are looked up in boundaries: per element if those are one sorted list."""
    boundaries = op.operand("boundaries") or op.operand("sorted_sequence")
    values = op.operand("self")
    if values is None or boundaries is None:
        return None
    if boundaries.ndim == 1 and boundaries.layout is None and op["sorter"] is None:
        return split(op, values.layout)
    layout = boundaries.layout or values.layout
    if layout is None or layout.dim == values.ndim - 1:
        return None
    size = axis_size(layout, op.n)
    uses = {}
    for k, operand in enumerate(op.operands):
        if operand.ndim != values.ndim or operand.shape[layout.dim] != size:
            return None
        if operand.layout not in (None, layout):
            return None
        uses[k] = Use(layout)
    return Verdict(outs=(layout,), uses=uses)
