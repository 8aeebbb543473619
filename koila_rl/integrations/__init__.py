"""One line in loops that others wrote; each module needs its library and is imported when asked."""

from __future__ import annotations

import importlib
from types import ModuleType

__all__ = ["sb3", "skrl", "tianshou", "torchrl"]


def __getattr__(name: str) -> ModuleType:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module(f"{__name__}.{name}")
