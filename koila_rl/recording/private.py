"""The private torch interfaces of the whole project, so that a new torch breaks one file."""

from __future__ import annotations

from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["FakeTensor", "FakeTensorMode", "TorchDispatchMode"]
