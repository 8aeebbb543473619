"""`register_batch_rule`: teach the analysis an operator of somebody's own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from koila_rl.errors import ConfigurationError
from koila_rl.recording.layouts import Layout
from koila_rl.recording.private import has_fake_kernel
from koila_rl.recording.recorder import forget_analyses
from koila_rl.recording.rules import Op, Reduction, RuleError, Use, Verdict, holds, register

__all__ = ["BatchRule", "register_batch_rule"]

Dims = int | None | Sequence[int | None] | str
BatchRule = Callable[..., Dims]
"""``rule(in_dims, *args, **kwargs)``: see `register_batch_rule`."""

_SUMS = {"sum": Reduction("sum"), "mean": Reduction("mean")}


def register_batch_rule(op: Any, rule: BatchRule) -> None:
    """Teach koila_rl where a custom operator keeps the samples of a minibatch.

    Without a rule an operator of `torch.library` runs on the whole minibatch, which is always
    right. With one it runs on microbatches, its registered backward too if that is seen to keep
    samples apart.

    Args:
        op: a function from `torch.library.custom_op`, an operator as ``torch.ops.mine.scale``, or
            its name as ``"mine::scale"``. It needs a fake kernel (``register_fake``) and must not
            write to its arguments.
        rule: called as ``rule(in_dims, *args, **kwargs)`` with the operator's arguments; tensors
            among them have shapes and no data. As in `torch.vmap`, ``in_dims`` holds for each
            positional argument the dimension along which samples lie, or None for an argument
            that is the same for all samples (a tuple of those for a list of tensors). It returns

            - the dimension along which samples lie in the result, or a tuple of one for each
              result (None for a result that does not depend on the samples);
            - ``"sum"`` or ``"mean"``, if samples are added up or averaged in the results;
            - None, if the operator mixes samples in this form: it then runs whole.

    Raises:
        ConfigurationError: for an operator that is not there, writes to its arguments or has no
            fake kernel, or a rule that cannot be called. Also when a program is recorded, if the
            shapes of results at two minibatch sizes do not follow the rule; it names the operator.

    Only shapes are compared: ``koila_rl.verify(loss)`` compares values.
    """
    name = _checked(op)
    if not callable(rule):
        raise ConfigurationError(f"the rule of {name} is {rule!r} but must be a function")
    register(name)(_Rule(name, rule))
    forget_analyses()


def _checked(op: Any) -> str:
    """The qualified name of a usable operator."""
    if isinstance(op, torch._ops.OpOverload):
        op = op.overloadpacket
    if isinstance(op, torch._ops.OpOverloadPacket):
        name = op._qualified_op_name
    else:
        name = getattr(op, "_qualname", op)
    if not isinstance(name, str) or name.count("::") != 1:
        raise ConfigurationError(
            f"register_batch_rule needs an operator of torch.library or its name as "
            f"'namespace::name', got {op!r}"
        )
    namespace, _, base = name.partition("::")
    packet = getattr(getattr(torch.ops, namespace), base, None)
    if packet is None:
        raise ConfigurationError(f"there is no operator {name}; define it before its rule")
    for overload in packet.overloads():
        func = getattr(packet, overload)
        if func._schema.is_mutable:
            raise ConfigurationError(
                f"{name} writes to its arguments ({func._schema}); give a rule to a form that "
                "returns its results"
            )
        if not has_fake_kernel(func):
            raise ConfigurationError(
                f"{name} has no fake kernel, so its results at another size are unknown; "
                f"give it one with torch.library.register_fake({name!r})"
            )
    return name


class _Rule:
    """A user's rule in the terms of the analysis."""

    def __init__(self, name: str, rule: BatchRule) -> None:
        self.name, self.rule = name, rule

    def __call__(self, op: Op) -> Verdict | None:
        layouts = {operand.layout for operand in op.operands if operand.layout is not None}
        if len({(layout.outer, layout.inner) for layout in layouts}) != 1:
            return None
        if any(operand.layout is None and op.n in operand.shape for operand in op.operands):
            # Rows that may belong to the samples; another reading cuts them along.
            return None
        found = self.rule(*self.arguments(op))
        if found is None:
            return None
        uses = {k: Use(operand.layout) for k, operand in enumerate(op.operands)}
        if isinstance(found, str):
            if found not in _SUMS:
                raise RuleError(f"the batch rule of {self.name} returned {found!r}; {_ANSWERS}")
            verdict = Verdict(reduction=_SUMS[found], uses=uses)
        else:
            (like, *_) = layouts
            verdict = Verdict(outs=self.outs(op, found, like), uses=uses)
        if not holds(op, verdict):
            raise RuleError(
                f"the batch rule of {self.name} returned {found!r}, but its results have shapes "
                f"{_shapes(op.outs)} for {op.n} samples and {_shapes(op.outs2)} for {op.n2}; "
                "correct the rule"
            )
        return verdict

    def arguments(self, op: Op) -> list[Any]:
        layouts = iter(op.operands)

        def dims(value: Any) -> Any:
            if isinstance(value, Tensor):
                layout = next(layouts).layout
                return layout.dim if layout is not None else None
            if isinstance(value, list | tuple):
                return tuple(dims(item) for item in value)
            return None

        return [tuple(map(dims, op.args.values())), *op.args.values()]

    def outs(self, op: Op, found: Any, like: Layout) -> tuple[Layout | None, ...]:
        dims = (found,) if isinstance(found, int) else tuple(found)
        whole = all(x is None or (isinstance(x, int) and not isinstance(x, bool)) for x in dims)
        if not whole or len(dims) != len(op.outs):
            raise RuleError(
                f"the batch rule of {self.name} returned {found!r} for {len(op.outs)} results; "
                f"{_ANSWERS}"
            )
        return tuple(
            None if dim is None else like.at(dim % max(len(shape), 1))
            for dim, shape in zip(dims, op.outs, strict=True)
        )


_ANSWERS = "it must return a dimension, a tuple of one for each result, 'sum', 'mean' or None"


def _shapes(shapes: Sequence[tuple[int, ...]]) -> str:
    return ", ".join(map(str, shapes))
