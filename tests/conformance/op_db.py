"""PyTorch's own operator samples, held eager against lazy.

PyTorch tests its operators with a database of several thousand sample calls. Here each sample's
first tensor, and with it the arguments of the same size, become a minibatch that runs in small
microbatches. Values and gradients must be eager's. Run as a script for the whole database::

    python -m tests.conformance.op_db --samples 20 --microbatch 1 --dim 1 --op softmax
"""

from __future__ import annotations

import argparse
import contextlib
import enum
import sys
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_leaves, tree_map

import koila_rl
from tests.helpers import largest_entry

SMALLEST = 3
"""A minibatch of fewer samples hardly splits."""

UNINITIALISED = ("empty", "new_empty", "resize_")
"""Operators whose output holds whatever the memory held."""


class Verdict(enum.Enum):
    """How a sample ended; only the first two are right."""

    SPLIT = "split"
    UNSPLIT = "unsplit"
    WRONG = "wrong"
    ERROR = "error"
    SKIPPED = "skipped"


@dataclass(frozen=True)
class Finding:
    """The verdict on one sample of one operator, with the reason where it is not right."""

    operator: str
    sample: int
    verdict: Verdict
    reason: str = ""

    def __str__(self) -> str:
        return f"{self.operator}[{self.sample}]: {self.verdict.value} {self.reason}"


@dataclass(frozen=True)
class Settings:
    """Which samples to judge, and how to split them."""

    samples: int = 3
    skip: int = 0
    microbatch: int = 2
    dim: int = 0
    inplace: bool = False


@dataclass(frozen=True)
class Attempt:
    """Values of one run of a sample, and gradients of its tensors in their order."""

    values: list[Tensor]
    gradients: list[Tensor | None]
    differentiable: list[bool]
    unsplit: bool = False


def name_of(operator: Any) -> str:
    """The operator's name with that of its variant."""
    return ".".join(filter(None, (operator.name, operator.variant_test_name)))


def operators(containing: str = "") -> list[Any]:
    """The operators whose name contains ``containing`` and whose output is initialised."""
    return [
        operator
        for operator in op_db
        if containing in name_of(operator) and not operator.name.startswith(UNINITIALISED)
    ]


def samples_of(operator: Any, settings: Settings) -> Iterator[Any]:
    """The samples whose first argument is a strided tensor with enough rows."""
    preferred = (torch.float64, torch.float32, torch.int64, torch.bool)
    dtype = next((d for d in preferred if d in operator.dtypes), None)
    if dtype is None:
        return
    kept = 0
    for sample in operator.sample_inputs("cpu", dtype, requires_grad=False):
        first = sample.input
        if not isinstance(first, Tensor) or first.is_complex() or first.layout != torch.strided:
            continue
        if first.ndim <= settings.dim or first.shape[settings.dim] < SMALLEST:
            continue
        kept += 1
        if kept > settings.skip + settings.samples:
            return
        if kept > settings.skip:
            yield sample


def attempt(
    call: Callable[..., Any],
    sample: Any,
    *,
    with_gradients: bool,
    wrap: Callable[[Tensor], Tensor] = lambda tensor: tensor,
    read_first: bool = False,
) -> Attempt:
    """Run one sample forward and backward on copies of its tensors."""

    def copied(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        new = leaf.detach().clone()
        return new.requires_grad_(with_gradients and new.is_floating_point())

    arguments = tree_map(copied, (sample.input, sample.args, sample.kwargs))
    originals = [leaf for leaf in tree_leaves(arguments) if isinstance(leaf, Tensor)]
    first, args, kwargs = tree_map(
        lambda leaf: wrap(leaf) if isinstance(leaf, Tensor) else leaf, arguments
    )
    torch.manual_seed(0)
    outputs = [out for out in tree_leaves(call(first, *args, **kwargs)) if isinstance(out, Tensor)]
    if read_first:
        for out in outputs:
            koila_rl.materialize(out)
    roots = [out for out in outputs if out.requires_grad and out.is_floating_point()]
    unsplit = False
    if with_gradients and roots:
        weighted = [(out * cotangent(out)).sum() for out in roots]
        sum(weighted[1:], weighted[0]).backward()
        unsplit = ran_unsplit()
    values = [koila_rl.materialize(out).detach() for out in outputs]
    return Attempt(
        values,
        [leaf.grad for leaf in originals],
        [out.requires_grad for out in outputs],
        unsplit or ran_unsplit(),
    )


def cotangent(out: Tensor) -> Tensor:
    """Weights that tell the entries of an output apart."""
    return torch.arange(out.numel(), dtype=out.dtype).cos().add(1.5).view(out.shape)


def ran_unsplit() -> bool:
    """Whether the last run put a call on the whole minibatch."""
    plan = koila_rl.last_plan()
    return plan is not None and bool(plan.unsplit)


def agree(mine: Tensor | None, theirs: Tensor | None) -> None:
    """Raise AssertionError unless both are None or equal to rounding.

    The bound is the largest entry's: entries that nearly cancel have no smaller error in eager.
    Solvers and inverses magnify rounding by their condition, hence 1e-10.
    """
    if mine is None or theirs is None:
        assert mine is theirs, f"{mine} where eager has {theirs}"
        return
    bound = {torch.float64: 1e-10, torch.float32: 1e-5}.get(theirs.dtype, 0.0)
    scale = max(1.0, largest_entry(theirs))
    torch.testing.assert_close(mine, theirs, rtol=bound, atol=bound * scale, equal_nan=True)


def judge(operator: Any, number: int, sample: Any, companions: bool, settings: Settings) -> Finding:
    """Hold one sample against eager; ``companions`` wraps the arguments of the same size too."""
    size = sample.input.shape[settings.dim]
    call = operator.inplace_variant if settings.inplace else operator.op

    def invoke(first: Tensor, *args: Any, **kwargs: Any) -> Any:
        return call(first * 1 if settings.inplace else first, *args, **kwargs)

    def wrap(tensor: Tensor) -> Tensor:
        rows = tensor.shape[settings.dim] if tensor.ndim > settings.dim else None
        seen[0] += 1
        if rows != size or (seen[0] > 1 and not companions):
            return tensor
        return koila_rl.lazy(tensor, batch=settings.dim)

    def found(verdict: Verdict, reason: str = "") -> Finding:
        return Finding(name_of(operator), number, verdict, " ".join(reason.split())[:200])

    seen = [0]
    with_gradients = operator.supports_autograd and sample.input.is_floating_point()
    expected = eager(invoke, sample, with_gradients)
    if expected is None:
        return found(Verdict.SKIPPED)
    try:
        with koila_rl.limits(microbatch=settings.microbatch):
            got = attempt(
                invoke,
                sample,
                with_gradients=with_gradients,
                wrap=wrap,
                read_first=number % 2 == 1,
            )
        assert got.differentiable == expected.differentiable, "requires_grad of an output"
        for mine, theirs in zip(got.values, expected.values, strict=True):
            agree(mine, theirs)
        for grad, eager_grad in zip(got.gradients, expected.gradients, strict=True):
            agree(grad, eager_grad)
    except AssertionError as error:
        return found(Verdict.WRONG, str(error))
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{frame.filename.rsplit('/', 1)[-1]}:{frame.lineno}"
        return found(Verdict.ERROR, f"{type(error).__name__} at {place}: {error}")
    return found(Verdict.UNSPLIT if got.unsplit else Verdict.SPLIT)


def eager(call: Callable[..., Any], sample: Any, with_gradients: bool) -> Attempt | None:
    """Eager's run; None where it fails, is random, or gives what is not compared."""
    try:
        expected = attempt(call, sample, with_gradients=with_gradients)
        torch.rand(1)
        again = attempt(
            lambda *args, **kwargs: (torch.manual_seed(1), call(*args, **kwargs))[1],
            sample,
            with_gradients=False,
        )
    except Exception:
        return None
    values = expected.values
    if not values or any(v.is_complex() or v.layout != torch.strided for v in values):
        return None
    same = all(
        torch.equal(a.nan_to_num(), b.nan_to_num())
        for a, b in zip(values, again.values, strict=True)
    )
    return expected if same else None


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence what operators and the recorder warn of while thousands of samples run."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def findings(operator: Any, settings: Settings) -> list[Finding]:
    """Judge the chosen samples of one operator, with and without their companions."""
    if settings.inplace and operator.inplace_variant is None:
        return []
    with quiet():
        return [
            judge(operator, settings.skip + i, sample, companions, settings)
            for i, sample in enumerate(samples_of(operator, settings))
            for companions in (False, True)
        ]


def main() -> int:
    """Judge the database; 0 if nothing was wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--op", default="", help="only operators whose name contains this")
    parser.add_argument("--samples", type=int, default=3, help="samples of each operator")
    parser.add_argument("--skip", type=int, default=0, help="samples of each to leave out first")
    parser.add_argument("--microbatch", type=int, default=2)
    parser.add_argument("--dim", type=int, default=0, help="the batch dimension")
    parser.add_argument("--inplace", action="store_true", help="judge the in-place variants")
    options = parser.parse_args()
    settings = Settings(
        options.samples, options.skip, options.microbatch, options.dim, options.inplace
    )
    count: Counter[Verdict] = Counter()
    always = 0
    for operator in operators(options.op):
        found = findings(operator, settings)
        count.update(finding.verdict for finding in found)
        always += bool(found) and {f.verdict for f in found} <= {Verdict.SPLIT, Verdict.SKIPPED}
        for finding in found:
            if finding.verdict in (Verdict.WRONG, Verdict.ERROR):
                print(finding, flush=True)
    print(" ".join(f"{verdict.value}={count[verdict]}" for verdict in Verdict))
    print(f"operators that always split: {always}")
    return 1 if count[Verdict.WRONG] + count[Verdict.ERROR] else 0


if __name__ == "__main__":
    sys.exit(main())
