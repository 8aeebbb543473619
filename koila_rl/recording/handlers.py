"""Calls on lazy tensors that are not recorded: questions about shape, forces, autograd's own.

Everything else goes to the recorder.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributions import Distribution

from koila_rl.recording.batch_norm import record_batch_norm
from koila_rl.recording.recorder import record, run_eagerly
from koila_rl.recording.sizes import batch_shape
from koila_rl.recording.tensor import HANDLERS, LazyTensor, untouched
from koila_rl.recording.values import Source
from koila_rl.recording.writes import node_of

__all__: list[str] = []

Args = tuple[Any, ...]
Kwargs = dict[str, Any]


def handles(*functions: Any) -> Callable[[Any], Any]:
    def add(handler: Any) -> Any:
        for function in functions:
            HANDLERS[function] = handler
        return handler

    return add


def _attribute(name: str) -> Any:
    return getattr(Tensor, name).__get__


def _setter(name: str) -> Any:
    return getattr(Tensor, name).__set__


def _pass_through(function: Any) -> None:
    def ask(args: Args, kwargs: Kwargs) -> Any:
        with untouched():
            return function(*args, **kwargs)

    HANDLERS[function] = ask


for _name in ("dtype", "device", "ndim", "layout", "is_cuda", "is_cpu", "is_mps", "is_sparse",
              "is_quantized", "is_meta", "is_nested", "itemsize", "is_xpu", "is_mkldnn", "names",
              "is_sparse_csr", "is_vulkan", "is_maia", "is_ipu", "is_mtia", "_version",
              "_backward_hooks", "output_nr", "name", "is_xla"):  # fmt: skip
    if hasattr(Tensor, _name):
        _pass_through(_attribute(_name))
for _name in ("dim", "ndimension", "is_floating_point", "is_complex", "element_size", "stride",
              "is_contiguous", "is_signed", "get_device", "storage_offset", "is_inference",
              "is_conj", "is_neg", "dim_order", "is_pinned", "_is_view"):  # fmt: skip
    _pass_through(getattr(Tensor, _name))
for _function in (torch.is_floating_point, torch.is_complex, torch.is_signed, torch.is_conj,
                  torch.is_neg, torch.is_inference, torch.get_device):  # fmt: skip
    _pass_through(_function)


def shape_of(tensor: LazyTensor) -> torch.Size:
    """The shape, with a `BatchInt` where the batch axis lies."""
    meta = tensor._node.meta
    if not meta.seen:
        sizes = list(meta.shape)
        if meta.layout is not None and meta.n > 1:
            sizes[meta.layout.dim] = batch_shape(meta.n, meta.layout.factor)
        meta.seen.append(torch.Size(sizes))
    return meta.seen[0]


@handles(_attribute("shape"))
def _shape(args: Args, kwargs: Kwargs) -> Any:
    return shape_of(args[0])


@handles(Tensor.size)
def _size(args: Args, kwargs: Kwargs) -> Any:
    dim = args[1] if len(args) > 1 else kwargs.get("dim")
    shape = shape_of(args[0])
    if dim is None:
        return shape
    if not -len(shape) <= dim < max(len(shape), 1):
        raise IndexError(
            f"Dimension out of range (expected to be in range of [{-len(shape)}, "
            f"{len(shape) - 1}], but got {dim})"
        )
    return shape[dim]


@handles(Tensor.numel, Tensor.nelement, torch.numel)
def _numel(args: Args, kwargs: Kwargs) -> Any:
    count: Any = 1
    for size in shape_of(args[0]):
        count = size * count
    return count


@handles(_attribute("nbytes"))
def _nbytes(args: Args, kwargs: Kwargs) -> int:
    meta = args[0]._node.meta
    return int(meta.nbytes)


@handles(_attribute("requires_grad"))
def _requires_grad(args: Args, kwargs: Kwargs) -> bool:
    return bool(args[0]._node.meta.requires_grad)


@handles(_attribute("is_leaf"))
def _is_leaf(args: Args, kwargs: Kwargs) -> bool:
    node = args[0]._node
    if not node.meta.requires_grad:
        return True
    return isinstance(node.call, Source) and node.call.data is not None and node.call.data.is_leaf


class RecordedFunction:
    """Stands for ``grad_fn`` of a recorded value: there will be one when it runs."""

    def __init__(self, tensor: LazyTensor) -> None:
        self._tensor = tensor

    def __getattr__(self, name: str) -> Any:
        tensor = object.__getattribute__(self, "_tensor")
        return getattr(tensor._runtime.attached(tensor._node).grad_fn, name)

    def __repr__(self) -> str:
        return "<RecordedFunction>"


@handles(_attribute("grad_fn"))
def _grad_fn(args: Args, kwargs: Kwargs) -> Any:
    node = args[0]._node
    point = getattr(args[0], "_recorded_function", None)
    if point is not None:
        return point if node.meta.requires_grad else None
    if node.attached is not None:
        return node.attached.grad_fn
    if isinstance(node.call, Source):
        return node.call.data.grad_fn if node.call.data is not None else None
    return RecordedFunction(args[0]) if node.meta.requires_grad else None


@handles(_attribute("grad"))
def _grad(args: Args, kwargs: Kwargs) -> Any:
    node = args[0]._node
    if isinstance(node.call, Source) and node.call.data is not None:
        return node.call.data.grad
    return getattr(args[0], "_retained", {}).get("grad")


@handles(_setter("grad"))
def _set_grad(args: Args, kwargs: Kwargs) -> None:
    node = args[0]._node
    if isinstance(node.call, Source) and node.call.data is not None:
        node.call.data.grad = args[1]


@handles(Tensor.requires_grad_)
def _set_requires_grad(args: Args, kwargs: Kwargs) -> Any:
    flag = args[1] if len(args) > 1 else kwargs.get("requires_grad", True)
    tensor = args[0]
    if tensor._node.meta.requires_grad == flag:
        return tensor
    tensor._node = tensor._runtime.leaf(tensor._node, flag)
    return tensor


@handles(_setter("requires_grad"))
def _assign_requires_grad(args: Args, kwargs: Kwargs) -> None:
    _set_requires_grad(args, kwargs)


@handles(_attribute("data"))
def _data(args: Args, kwargs: Kwargs) -> Any:
    return record(Tensor.detach, (args[0],), {})


@handles(_setter("data"))
def _set_data(args: Args, kwargs: Kwargs) -> None:
    target, value = args
    if isinstance(target, LazyTensor):
        target._node = node_of(value.detach())
    else:
        target.data = value._runtime.value(value._node)


# Values that the user reads.


def _force(function: Any) -> Any:
    def forced(args: Args, kwargs: Kwargs) -> Any:
        real = [x._runtime.value(x._node) if isinstance(x, LazyTensor) else x for x in args]
        return function(*real, **kwargs)

    return forced


for _name in ("item", "tolist", "__int__", "__float__", "__index__", "__complex__",
              "__array__", "__contains__", "__format__", "data_ptr", "untyped_storage",
              "storage", "_typed_storage", "__dlpack__", "__dlpack_device__"):  # fmt: skip
    if hasattr(Tensor, _name):
        HANDLERS[getattr(Tensor, _name)] = _force(getattr(Tensor, _name))
for _reader in (torch.equal, torch.allclose, torch.is_nonzero, torch.is_same_size):
    HANDLERS[_reader] = _force(_reader)


@handles(Tensor.numpy)
def _numpy(args: Args, kwargs: Kwargs) -> Any:
    tensor = args[0]
    if tensor._node.meta.requires_grad and not kwargs.get("force"):
        raise RuntimeError(
            "Can't call numpy() on Tensor that requires grad. Use tensor.detach().numpy() instead."
        )
    return tensor._runtime.value(tensor._node).numpy(**kwargs)


@handles(Tensor.__repr__)
def _repr(args: Args, kwargs: Kwargs) -> str:
    tensor = args[0]
    value = tensor._runtime.value(tensor._node)
    with torch.no_grad():
        text = repr(value.requires_grad_(False))
    if tensor._node.meta.requires_grad:
        return text[:-1] + ", requires_grad=True, lazy=True)"
    return text[:-1] + ", lazy=True)"


_DEFERRED = {Distribution.__init__.__code__, Distribution._validate_sample.__code__}


@handles(Tensor.__bool__)
def _bool(args: Args, kwargs: Kwargs) -> bool:
    """A validation inside torch.distributions is checked at the run; others force."""
    tensor = args[0]
    frame: Any = sys._getframe(1)
    for _ in range(4):
        if frame is None:
            break
        if frame.f_code in _DEFERRED and tensor._node.value is None:
            tensor._runtime.defer_check(tensor, _message(frame.f_locals))
            return True
        frame = frame.f_back
    return bool(tensor._runtime.value(tensor._node))


def _message(scope: dict[str, Any]) -> str:
    name = type(scope["self"]).__name__
    if "constraint" in scope:
        return (
            f"Expected parameter {scope['param']} of distribution {name} to satisfy the "
            f"constraint {scope['constraint']!r}, but found invalid values"
        )
    support = scope.get("support")
    return (
        f"Expected value argument to be within the support ({support!r}) of the distribution "
        f"{name}, but found invalid values"
    )


@handles(torch._is_all_true)
def _all_true(args: Args, kwargs: Kwargs) -> Any:
    return record(torch.all, args, kwargs)


@handles(Tensor.__iter__)
def _iterate(args: Args, kwargs: Kwargs) -> Any:
    """Along the batch, rows are values and force; along another dimension they are recorded."""
    tensor = args[0]
    meta = tensor._node.meta
    if not meta.shape:
        raise TypeError("iteration over a 0-d tensor")
    if meta.layout is not None and meta.layout.dim == 0 and meta.n > 1:
        return iter(tensor._runtime.attached(tensor._node).unbind(0))
    return iter(record(torch.unbind, (tensor, 0), {}))


@handles(Tensor.__len__)
def _len(args: Args, kwargs: Kwargs) -> int:
    return len(args[0])


@handles(Tensor.__hash__)
def _hash(args: Args, kwargs: Kwargs) -> int:
    return id(args[0])


@handles(Tensor.__reduce_ex__)
def _reduce(args: Args, kwargs: Kwargs) -> Any:
    return args[0]._runtime.value(args[0]._node).clone().__reduce_ex__(*args[1:])


@handles(Tensor.__deepcopy__)
def _deepcopy(args: Args, kwargs: Kwargs) -> Any:
    return LazyTensor.__deepcopy__(*args)


# Autograd.


@handles(Tensor.backward)
def _backward(args: Args, kwargs: Kwargs) -> None:
    names = ("gradient", "retain_graph", "create_graph", "inputs")
    options = dict(zip(names, args[1:], strict=False)) | kwargs
    args[0]._runtime.backward(
        args[0]._node, options.get("gradient"), options.get("retain_graph"),
        bool(options.get("create_graph")), options.get("inputs"),
    )  # fmt: skip


@handles(torch.autograd.grad)
def _autograd_grad(args: Args, kwargs: Kwargs) -> Any:
    names = ("outputs", "inputs", "grad_outputs", "retain_graph", "create_graph")
    options = dict(zip(names, args, strict=False)) | kwargs
    outputs = options["outputs"]
    outputs = [outputs] if isinstance(outputs, Tensor) else list(outputs)
    inputs = options["inputs"]
    inputs = [inputs] if isinstance(inputs, Tensor) else list(inputs)
    lazy = next(x for x in (*outputs, *inputs) if isinstance(x, LazyTensor))
    return lazy._runtime.gradients(outputs, inputs, options)


@handles(Tensor.register_hook)
def _register_hook(args: Args, kwargs: Kwargs) -> Any:
    tensor, hook = args[0], args[1] if len(args) > 1 else kwargs["hook"]
    return tensor._runtime.hook(tensor, hook)


@handles(Tensor.retain_grad)
def _retain_grad(args: Args, kwargs: Kwargs) -> None:
    args[0]._runtime.retain(args[0])


@handles(_attribute("retains_grad"))
def _retains_grad(args: Args, kwargs: Kwargs) -> bool:
    return False


@handles(F.batch_norm)
def _batch_norm(args: Args, kwargs: Kwargs) -> Any:
    return record_batch_norm(args, kwargs)


for _name in ("squeeze_", "unsqueeze_", "t_", "transpose_", "swapaxes_", "swapdims_"):
    # These change the tensor's own shape; the operators arrive in __torch_dispatch__.
    _pass_through(getattr(Tensor, _name))


@handles(torch.squeeze, Tensor.squeeze)
def _squeeze(args: Args, kwargs: Kwargs) -> Any:
    """Without a dimension, the sizes of the whole minibatch decide, not of a microbatch."""
    if len(args) == 1 and not kwargs:
        meta = args[0]._node.meta
        dims = tuple(d for d, size in enumerate(meta.shape) if size == 1)
        return record(torch.squeeze, (args[0], dims), {})
    return record(torch.squeeze, args, kwargs)


@handles(Tensor.split, torch.functional.split)
def _split(args: Args, kwargs: Kwargs) -> Any:
    return record(torch.functional.split, args, kwargs)


__all__ += ["run_eagerly"]
