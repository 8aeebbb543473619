"""Which device an agent learns on where it was left open."""

from __future__ import annotations

import torch

from koila_rl.errors import ConfigurationError

__all__ = ["choose_device"]


def choose_device(asked: torch.device | str, convolutional: bool) -> tuple[torch.device, str]:
    """The device for ``asked`` (``"auto"`` or a name), and the reason in a few words.

    Raises:
        ConfigurationError: PyTorch does not know the device or cannot reach it.
    """
    if asked == "auto":
        accelerator = _accelerator()
        if accelerator is None:
            return torch.device("cpu"), "no accelerator was found"
        if not convolutional:
            return torch.device("cpu"), "small perceptrons run faster there than on an accelerator"
        return accelerator, "the network is convolutional"
    try:
        device = torch.device(asked)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigurationError(f"device {str(asked)!r} cannot be used: {reason}") from error
    return device, "asked for"


def _accelerator() -> torch.device | None:
    if torch.cuda.is_available():
        return torch.device("cuda")
    if torch.backends.mps.is_available():
        return torch.device("mps")
    return None
