"""What differs on CUDA from the trace on a CPU that plans are made from.

A fake CUDA tensor that requires a gradient cannot exist in a build for CPUs, so plans for a CUDA
device that is not here go by CPU kernels. This is what is known to differ, from PyTorch's source;
none of it has been measured on a device yet.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

__all__ = ["CONTEXT_BYTES", "DIFFERENCES", "Difference", "differences_in"]

CONTEXT_BYTES = 512 << 20
"""Assumed of a CUDA context, libraries and their handles; between 300 and 600 MiB as a rule."""


@dataclass(frozen=True, slots=True)
class Difference:
    """A kind of call whose memory is not the same on both."""

    what: str
    operators: tuple[str, ...]
    """Names in a trace on a CPU that tell of it."""
    on_cpu: str
    on_cuda: str
    planned: str
    """Whether the plan is too high or too low for it."""


DIFFERENCES = (
    Difference(
        "dropout", ("bernoulli_", "native_dropout"), "mask of the input's type, and its scaling",
        "mask of one byte an element", "too high",
    ),
    Difference(
        "attention",
        ("_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_attention_math",
         "_safe_softmax"),
        "flash for the CPU, or all weights written out where dropout or a mask asks for it",
        "flash, memory-efficient or cuDNN kernels, which keep a log-sum-exp a row and a random "
        "state, and pad heads to multiples of 8",
        "too high where the CPU writes weights out",
    ),
    Difference(
        "convolution", ("convolution", "convolution_backward"),
        "scratch memory of oneDNN, left out here", "scratch memory that cuDNN chooses, up to what "
        "its algorithm asks for", "too low",
    ),
    Difference(
        "recurrent layers", ("mkldnn_rnn_layer", "_thnn_fused_lstm_cell", "lstm", "gru"),
        "oneDNN's workspace for LSTM, step by step for GRU",
        "one cuDNN call with its reserve and a copy of the weights in one piece", "either way",
    ),
    Difference(
        "matrix products", ("mm", "addmm", "bmm"), "none", "cuBLAS workspace, 8 MiB a handle and "
        "stream (32 MiB on compute capability 9.0)", "too low, once",
    ),
    Difference(
        "batch normalisation", ("native_batch_norm", "cudnn_batch_norm"), "none",
        "cuDNN's reserve in training", "too low",
    ),
    Difference(
        "random states", ("bernoulli_", "normal_", "uniform_"), "5 KiB for each call and "
        "microbatch, left out here", "16 bytes in host memory", "right",
    ),
)  # fmt: skip


def differences_in(names: Iterable[str]) -> tuple[Difference, ...]:
    """Those that concern a program of these operators (``short_name`` of them)."""
    found = set(names)
    return tuple(item for item in DIFFERENCES if found & set(item.operators))
