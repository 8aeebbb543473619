"""Where in the user's code a call was recorded."""

from __future__ import annotations

import sys
from typing import Any

__all__ = ["Where", "caller"]

Where = tuple[str, int] | None

_INSIDE = ("/torch/", "/koila_rl/recording/", "/koila_rl/pending", "<koila_rl ")
# By the name of a file: whether it belongs to torch or to the recorder.
_inside: dict[str, bool] = {}


def caller() -> Where:
    """File and line of the code outside torch and this package that made the call."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        inside = _inside.get(name)
        if inside is None:
            path = name.replace("\\", "/")
            inside = _inside[name] = any(part in path for part in _INSIDE)
        if not inside:
            return name, frame.f_lineno
        frame = frame.f_back
    return None
