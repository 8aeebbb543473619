"""`verify`: run a recorded loss whole and split, and compare, so that nobody has to believe us."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from koila_rl.engine.binding import bind
from koila_rl.engine.gradients import Execution
from koila_rl.engine.program import Bound
from koila_rl.errors import ConfigurationError
from koila_rl.memory.limits import current_limits
from koila_rl.recording.tensor import LazyTensor
from koila_rl.recording.values import Captured, Node
from koila_rl.session import neutral, run_whole

__all__ = ["Deviation", "Verification", "verify"]


@dataclass(frozen=True, slots=True)
class Deviation:
    """How far one gradient under the split lies from that of the whole minibatch."""

    name: str
    shape: tuple[int, ...]
    absolute: float
    """Largest difference of an entry."""
    relative: float
    """The same over the largest entry of the whole minibatch's gradient of this tensor, or over
    a thousandth of the largest of all where that is more: a gradient that is zero but for
    rounding, as that of a bias before BatchNorm, has no relative error."""


@dataclass(frozen=True, slots=True)
class Verification:
    """A loss and its gradients, whole against split."""

    batch_size: int
    microbatch_size: int
    whole: float
    split: float
    deviations: tuple[Deviation, ...]
    random: bool

    @property
    def worst(self) -> float:
        """The largest relative deviation of a gradient; 0 without any."""
        return max((item.relative for item in self.deviations), default=0.0)

    def __str__(self) -> str:
        lines = [
            f"minibatch {self.batch_size:,} whole against microbatches of "
            f"{self.microbatch_size:,}: loss {self.whole:.9g} and {self.split:.9g}, "
            f"gradients to {self.worst:.1e}"
        ]
        if self.random:
            lines.append(
                "  random calls draw other numbers under a split; deviations show that too"
            )
        width = max((len(item.name) for item in self.deviations), default=0)
        lines += [
            f"  {item.name:<{width}}  {tuple(item.shape)!s:<18}  {item.relative:.1e}"
            for item in sorted(self.deviations, key=lambda item: -item.relative)
        ]
        return "\n".join(lines)


def verify(loss: Tensor, module: nn.Module | None = None) -> Verification:
    """Run the program behind ``loss`` whole and in microbatches, and compare gradients.

    No ``.grad``, buffer or random state changes. The whole minibatch must fit.

    Args:
        loss: a recorded scalar.
        module: names the parameters in the report.

    Raises:
        ConfigurationError: the loss is not a recorded scalar, or nothing behind it can be split.
    """
    if not isinstance(loss, LazyTensor) or loss._node.meta.shape:
        raise ConfigurationError(
            f"verify() needs a recorded scalar, got {type(loss).__name__} of shape "
            f"{tuple(loss.shape)}; compute the loss on a minibatch from koila_rl.lazy()"
        )
    bound = bind([loss._node], loss._node)
    n = bound.program.n
    if n <= 1 or loss._node.attached is not None:
        raise ConfigurationError(
            "verify() must come before the loss has run, on a minibatch of two samples or more"
        )
    size = min(current_limits().microbatch or -(-n // 4), n - 1)
    leaves, names = _leaves(bound, module)
    with _undisturbed(bound), torch.enable_grad(), neutral():
        whole = run_whole(bound)[0]
        expected = torch.autograd.grad(whole, leaves, allow_unused=True) if leaves else ()
        split = Execution(bound, size).run(grad=True, gradient=torch.ones_like(whole))[0]
        got = torch.autograd.grad(split, leaves, allow_unused=True) if leaves else ()
    floor = 1e-3 * max((float(g.abs().max()) for g in expected if g is not None and g.numel()),
                       default=0.0)  # fmt: skip
    deviations = [
        _deviation(name, leaf, a, b, floor)
        for name, leaf, a, b in zip(names, leaves, expected, got, strict=True)
    ]
    return Verification(
        n, size, float(whole.detach()), float(split.detach()), tuple(deviations),
        bound.program.random,
    )  # fmt: skip


def _leaves(bound: Bound, module: nn.Module | None) -> tuple[list[Tensor], list[str]]:
    known = {id(p): name for name, p in module.named_parameters()} if module is not None else {}
    leaves, names = [], []
    for item in bound.tensors:
        tensor = item.tensor if isinstance(item, Captured) else _source(item)
        if tensor is not None and tensor.requires_grad:
            leaves.append(tensor)
            names.append(known.get(id(tensor), f"tensor {len(leaves)}"))
    return leaves, names


def _source(node: Node) -> Tensor | None:
    return node.attached if node.attached is not None else getattr(node.call, "data", None)


def _deviation(
    name: str, leaf: Tensor, whole: Tensor | None, split: Tensor | None, floor: float
) -> Deviation:
    a = whole if whole is not None else torch.zeros_like(leaf)
    b = split if split is not None else torch.zeros_like(leaf)
    absolute = float((a - b).abs().max()) if a.numel() else 0.0
    scale = max(float(a.abs().max()) if a.numel() else 0.0, floor)
    return Deviation(name, tuple(leaf.shape), absolute, absolute / scale if scale else absolute)


@contextmanager
def _undisturbed(bound: Bound) -> Iterator[None]:
    """Effects count as done, and random states drawn meanwhile are forgotten."""
    states = [call.state for call in bound.calls if call.state is not None]
    before = [(state.done, dict(state.random)) for state in states]
    devices: Sequence[int] = range(torch.cuda.device_count()) if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices=list(devices)):
        for state in states:
            state.done = True
        try:
            yield
        finally:
            for state, (done, random) in zip(states, before, strict=True):
                state.done, state.random = done, random
