"""An update in slices that run between the steps of an environment.

The schedule counts slices and never looks at a clock, so that runs repeat. After step s of S the
share s / S of all slices has run, rounded down: an optimizer step falls between the same two steps
of the environment whether its minibatch is split or not.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator
from contextlib import suppress
from types import TracebackType
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

import koila_rl
from koila_rl.envs import Step, VectorEnvironment

__all__ = ["UPDATES", "Update", "Work", "backward"]

UPDATES = ("blocking", "interleaved")

Work = Generator[int, None, dict[str, float]]
"""Runs one slice more each time and yields before it how many are left; returns metrics."""


def backward(loss: Tensor, minibatches_left: int, sliced: bool) -> Iterator[int]:
    """``loss.backward()`` as part of :data:`Work`, with ``minibatches_left`` like it to follow.

    Where ``sliced``, a slice is a microbatch, else the whole backward.
    """
    if not sliced:
        yield 1 + minibatches_left
        loss.backward()
        return
    with koila_rl.start_backward(loss) as running:
        slices = running.remaining
        while not running.done:
            yield running.remaining + slices * minibatches_left
            running.advance()


class Update:
    """An update that steps of an environment are taken from beside, or one that has ended.

    As a context manager it is finished at the end of the block, or cancelled by an error: then
    the backward that was running has changed nothing.
    """

    def __init__(self, work: Work | None = None) -> None:
        self._work = work
        self._begun = False
        self._ran = self._left = 0
        self._seconds = self._hidden = 0.0
        self._retries = 0
        self.metrics: dict[str, float] = {}
        """Of the agent, and how it ran; empty until it has ended."""

    @property
    def done(self) -> bool:
        """Whether nothing is left to run."""
        return self._work is None

    def step(self, env: VectorEnvironment, action: NDArray[Any], number: int, of: int) -> Step:
        """Step ``number`` (from 1) of the ``of`` steps in which the update runs, and its slices.

        Raises:
            EnvironmentFailedError: An environment raised.
        """
        if self.done:
            return env.step(action)
        env.step_async(action)
        try:
            seconds = self._advance(number, of)
        except BaseException:
            # Nobody else waits for the step that has begun.
            with suppress(Exception):
                env.step_wait()
            raise
        if env.asynchronous:
            self._hidden += seconds
        if self.done:
            self.metrics["time/hidden_update_share"] = self._hidden / self._seconds
        return env.step_wait()

    def finish(self) -> dict[str, float]:
        """Run all that is left; returns the metrics."""
        self._advance(1, 1)
        return self.metrics

    def cancel(self) -> None:
        """Give up what has not ended; optimizer steps that were taken stay."""
        if self._work is not None:
            self._work.close()
            self._work = None

    def _advance(self, number: int, of: int) -> float:
        """Run what is due by step ``number`` of ``of``; returns how long that took, in seconds."""
        if self.done:
            return 0.0
        began = time.perf_counter()
        if not self._begun:
            self._begun = True
            self._next()
        # All of it by the last step, whatever was said to be left.
        while not self.done and (
            number == of or self._ran < (self._ran + self._left) * number // of
        ):
            self._ran += 1
            self._next()
        seconds = time.perf_counter() - began
        self._seconds += seconds
        if self.done:
            self.metrics |= {
                "time/update_seconds": self._seconds,
                "time/hidden_update_share": self._hidden / self._seconds,
                "memory/retries": float(self._retries),
            }
        return seconds

    def _next(self) -> None:
        assert self._work is not None
        before = koila_rl.last_plan()
        try:
            # Steps of an environment are taken without gradients.
            with torch.enable_grad():
                self._left = next(self._work)
        except StopIteration as end:
            self.metrics, self._work = dict(end.value), None
        plan = koila_rl.last_plan()
        # A run that was repeated has a plan of its own.
        if plan is not None and plan is not before:
            self._retries += plan.retries

    def __enter__(self) -> Update:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Finish, or cancel where an error comes."""
        if kind is None:
            self.finish()
        else:
            self.cancel()
