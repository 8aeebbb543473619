"""What equal recordings share: calls, steps, stages and their code.

A `Program` is independent of the tensors it ran on; a `Bound` program adds those of one
recording.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

from koila_rl.engine.cuts import ProgramStep, Schedule
from koila_rl.engine.replay import Body
from koila_rl.recording.layouts import Layout
from koila_rl.recording.values import Call, Captured, Node

__all__ = ["Bound", "Input", "Program", "Stage", "Tail"]


@dataclass(slots=True)
class Input:
    """An input of a program: how it lies, and whether it asks for a gradient."""

    number: int
    layout: Layout | None
    n: int
    requires_grad: bool


@dataclass(slots=True)
class Stage:
    """The steps between two levels of cuts for one minibatch size, as code.

    ``rows`` are the values taken slice by slice with the layout of the slice, ``whole`` those
    taken whole, ``prefix`` row indices. ``outputs`` are what the code returns.
    """

    level: int
    n: int
    steps: list[ProgramStep]
    rows: list[tuple[int, Layout, bool]]
    whole: list[int]
    outputs: list[int]
    reductions: dict[int, Any]
    layouts: dict[int, Layout]
    requires_grad: dict[int, bool]
    body: Body
    # How operands are named in the code, and where each call's constants begin.
    code: tuple[list[dict[int, Any]], list[int]]
    # The code in parts that are computed again in the backward, by their number.
    bodies: dict[int, Body] = field(default_factory=dict)

    @property
    def differentiable(self) -> bool:
        """Whether gradients can go through the stage."""
        wanted = any(self.requires_grad.get(v, False) for v in self.outputs)
        return wanted and any(step.requires_grad for step in self.steps)


@dataclass(slots=True)
class Tail:
    """The global steps from the sums of the last stage to the target of a backward."""

    inputs: list[int]
    body: Body


@dataclass
class Program:
    """A recorded program up to some root values, independent of the tensors it ran on."""

    inputs: list[Input]
    calls: list[Any]
    steps: list[ProgramStep]
    roots: list[int]
    schedule: Schedule
    stages: list[list[Stage]]
    globals_: list[list[ProgramStep]]
    whole: Body
    n: int
    random: bool
    requires_grad: dict[int, bool]
    fused: tuple[int, ...] | None
    plans: dict[Any, Any] = field(default_factory=dict)
    global_bodies: list[Body] = field(default_factory=list)
    tail: Tail | None = None
    fused_metas: dict[int, Any] = field(default_factory=dict)
    drops: list[list[int]] = field(default_factory=list)
    # How often it has been bound the general way, and whether code recognises it by now.
    met: int = 0
    recognised: bool = False
    # What times microbatch sizes (`koila_rl.memory.tuner.Tuner`), by the memory allowed.
    tuners: dict[Any, Any] = field(default_factory=dict)
    # A size that failed although it was planned (`koila_rl.recovery.Failure`).
    failure: Any = None
    # Shape, type and device of each root.
    root_metas: list[Any] = field(default_factory=list)
    unsplit: tuple[int, ...] = ()

    @functools.cached_property
    def outer(self) -> bool:
        """Whether a call must be part of the backward that reaches the parameters."""
        return any(getattr(info.func, "outer", False) for info in self.calls)

    @property
    def sizes(self) -> list[int]:
        """The minibatch sizes that occur, largest first."""
        return sorted({stage.n for level in self.stages for stage in level}, reverse=True)


@dataclass(slots=True)
class Bound:
    """A program with the tensors of one recording."""

    program: Program
    tensors: list[Any]
    calls: list[Call]
    consts: list[Any]
    roots: list[Node]
    # Tensors from outside, each with the call that took it: what must not have changed since.
    captured: list[tuple[Captured, Call]]
