"""A backward in slices, run between the steps of an environment.

The backward runs in a thread of its own, but never beside the caller: ``advance`` lets it run a
number of microbatches and waits, so what happens depends on counts and not on time. Nothing
else would stop in the middle of PyTorch's own engine, which runs the stages of a program.
"""

from __future__ import annotations

import contextvars
import threading
from types import TracebackType

import torch
from torch import Tensor

from koila_rl import session
from koila_rl.backward import run_backward
from koila_rl.engine.gradients import turns
from koila_rl.engine.program import Bound
from koila_rl.engine.turns import pausing
from koila_rl.errors import ConfigurationError
from koila_rl.gathering import check_fresh
from koila_rl.memory.plan import Plan
from koila_rl.pending import PENDING
from koila_rl.recording.private import dispatch_modes, with_modes
from koila_rl.recording.repeats import restart
from koila_rl.recording.tensor import LazyTensor
from koila_rl.recording.values import Call, Node

__all__ = ["SlicedBackward", "start_backward"]


class _Cancelled(BaseException):
    """Ends a backward that is not wanted any more; no error of the user's."""


class _Run:
    """The backward in its thread. Only one of the two threads runs at a time."""

    def __init__(self, node: Node, gradient: Tensor | None) -> None:
        self.node, self.gradient = node, gradient
        PENDING.sliced.add(node)
        self.live = PENDING.live()
        self.caller, self.worker = threading.Semaphore(0), threading.Semaphore(0)
        self.left = self.count = self.turns = 0
        self.ended = self.cancelled = False
        self.error: BaseException | None = None
        self.bound: Bound | None = None
        self.plan: Plan | None = None
        self.modes = dispatch_modes()
        self.device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
        self.n_threads = torch.get_num_threads()
        context = contextvars.copy_context()
        self.thread = threading.Thread(
            target=context.run, args=(self.work,), daemon=True, name="koila_rl backward"
        )
        self.thread.start()

    def resume(self, microbatches: int) -> None:
        """In the caller's thread: let it run, and wait until it hands over or ends."""
        self.left = microbatches
        self.worker.release()
        self.caller.acquire()
        if self.ended:
            self.thread.join()

    def cancel(self) -> None:
        self.cancelled = True
        if not self.ended:
            self.worker.release()
            self.thread.join()

    def work(self) -> None:
        self.worker.acquire()
        try:
            # A new thread would compute with as many threads as there are cores.
            torch.set_num_threads(self.n_threads)
            if self.device is not None:
                torch.cuda.set_device(self.device)
            with with_modes(self.modes), pausing(self.hand_over):
                self.gradient = run_backward(
                    self.node, self.gradient, False, False, self.live, self.began
                )
            self.plan = session.last_plan()
        except _Cancelled:
            pass
        except BaseException as error:
            self.error = error
        finally:
            PENDING.sliced.discard(self.node)
            self.ended = True
            self.caller.release()

    def began(self, bound: Bound, plan: Plan) -> None:
        self.bound, self.plan = bound, plan
        self.turns = turns(bound.program, plan.microbatch_size) if plan.split else 1
        if not plan.split:
            # In one piece, before which it pauses as before a microbatch.
            self.hand_over()

    def hand_over(self) -> None:
        """In the backward's thread: wait until the caller lets it go on."""
        if not self.left:
            self.caller.release()
            self.worker.acquire()
        if self.cancelled:
            raise _Cancelled
        self.left -= 1
        self.count += 1


class _Kept:
    """A loss whose graph was kept when it was read: its backward is one piece."""

    bound: Bound | None = None
    error: BaseException | None = None
    turns = 1

    def __init__(self, node: Node, gradient: Tensor | None) -> None:
        self.node, self.gradient = node, gradient
        self.plan = session.last_plan()
        self.count = 0
        self.ended = self.cancelled = False

    def resume(self, microbatches: int) -> None:
        self.count = microbatches
        self.ended = microbatches > 0

    def cancel(self) -> None:
        self.cancelled = True


class SlicedBackward:
    """A backward that runs some microbatches at a time; made by `start_backward`.

    Gradients arrive together when the last microbatch has run; until then every ``.grad`` is as
    it was. As a context manager it finishes at the end of the block, or is cancelled by an error.
    """

    def __init__(self, node: Node, gradient: Tensor | None) -> None:
        self._delivered = False
        restart()
        # The thread does not know this object, so that it ends when nobody holds it any more.
        kept = node.attached is not None
        self._run: _Run | _Kept = _Kept(node, gradient) if kept else _Run(node, gradient)
        # Up to the first microbatch: then the plan is known.
        self._resume(0)

    @property
    def done(self) -> bool:
        """Whether all microbatches have run and the gradients are there."""
        return self._delivered

    @property
    def plan(self) -> Plan:
        """What runs, and in how many microbatches."""
        assert self._run.plan is not None
        return self._run.plan

    @property
    def remaining(self) -> int:
        """Microbatches of all passes that are still to run, as planned; 0 when done."""
        if self._delivered:
            return 0
        return max(1, self._run.turns - self._run.count)

    def advance(self, microbatches: int = 1) -> bool:
        """Run the next microbatches, fewer if there are no more; whether the backward is done.

        Raises:
            StaleValueError: a parameter or the minibatch has changed since the backward began.
                The backward is cancelled; no gradient has changed.
            ConfigurationError: it was cancelled before, or ``microbatches`` is below 1.
        """
        whole = isinstance(microbatches, int) and not isinstance(microbatches, bool)
        if not whole or microbatches < 1:
            raise ConfigurationError(f"advance() runs at least 1 microbatch, got {microbatches!r}")
        if self._run.cancelled:
            raise ConfigurationError("this backward was cancelled; start another")
        if self._delivered:
            return True
        try:
            if self._run.bound is not None:
                check_fresh(self._run.bound)
        except BaseException:
            self.cancel()
            raise
        self._resume(microbatches)
        return self._delivered

    def finish(self) -> None:
        """Run all microbatches that are left, and hand over the gradients."""
        while not self._delivered:
            self.advance(self.remaining)

    def cancel(self) -> None:
        """Give it up: gradients, buffers and random states are as before. Harmless when done."""
        if not self._delivered and not self._run.cancelled:
            self._run.cancel()

    def _resume(self, microbatches: int) -> None:
        run = self._run
        run.resume(microbatches)
        if not run.ended:
            return
        if run.error is not None:
            run.cancelled = True
            raise run.error
        session.note_plan(self.plan)
        # In the caller's thread, where hooks expect to be called.
        PENDING.attached(run.node).backward(run.gradient)
        self._delivered = True

    def __enter__(self) -> SlicedBackward:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        if kind is not None:
            self.cancel()
        elif not self._run.cancelled:
            self.finish()

    def __del__(self) -> None:
        if hasattr(self, "_run"):
            self.cancel()

    def __repr__(self) -> str:
        state = "cancelled" if self._run.cancelled else "done" if self._delivered else ""
        return f"<SlicedBackward: {state or f'{self.remaining} microbatches to run'}>"


def start_backward(loss: Tensor, gradient: Tensor | None = None) -> SlicedBackward:
    """``loss.backward()`` in slices, with something else in between.

    ::

        with koila_rl.start_backward(loss) as backward:
            while not backward.done:
                envs.step_async(actions)
                backward.advance()
                envs.step_wait()
        optimizer.step()

    Args:
        loss: A recorded scalar; with ``gradient``, any recorded value.
        gradient: Of the objective with respect to ``loss``, in its shape; 1 for a scalar.

    Returns:
        The backward, before its first microbatch. Parameters must not change until it is done.
        Of a loss that was read and whose graph was kept, it is one piece.

    Raises:
        ConfigurationError: ``loss`` is no recorded value, or its backward runs in slices already.
            So does ``loss.backward()`` meanwhile.
        InsufficientMemoryError: Not even one sample fits; nothing has run.
    """
    if not isinstance(loss, LazyTensor) or not isinstance(loss._node.call, Call):
        raise ConfigurationError(
            f"start_backward() needs a recorded loss, got {type(loss).__name__}; compute it on a "
            "minibatch from koila_rl.lazy()"
        )
    if not loss._node.meta.requires_grad:
        raise ConfigurationError(
            "the loss does not require gradients, so there is nothing to run backward"
        )
    PENDING.refuse_sliced(loss._node)
    if isinstance(gradient, LazyTensor):
        gradient = PENDING.attached(gradient._node)
    return SlicedBackward(loss._node, gradient)
