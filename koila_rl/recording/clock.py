"""A count of optimizer steps: fused optimizers change parameters without a version bump."""

from __future__ import annotations

from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook

__all__ = ["optimizer_steps", "stepped_since"]

_steps = 0
_last: dict[int, int] = {}


def _after_step(optimizer: Any, args: Any, kwargs: Any) -> None:
    global _steps
    _steps += 1
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            _last[_place(parameter)] = _steps


register_optimizer_step_post_hook(_after_step)


def _place(tensor: Any) -> int:
    """Where the data lies: ``parameter.data`` is stepped with its parameter."""
    try:
        return int(tensor.untyped_storage().data_ptr())
    except (NotImplementedError, RuntimeError):
        return id(tensor)


def optimizer_steps() -> int:
    return _steps


def stepped_since(parameter: Any, steps: int) -> bool:
    """Whether an optimizer has stepped ``parameter`` after the given count."""
    return _last.get(_place(parameter), 0) > steps
