"""Rules of contractions, convolutions, pooling, normalisation, attention and recurrent layers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from koila_rl.recording.layouts import Layout
from koila_rl.recording.rules import Op, Reduction, Use, Verdict, axis_size, register, split

__all__ = ["convolution"]


def _contract(op: Op, a: int, b: int) -> Verdict | None:
    """A matrix product of operands a and b: batch rows, batch columns, or summed over."""
    left, right = op.operands[a], op.operands[b]
    lone = op.name in ("mv", "addmv")
    ndim = left.ndim
    out = len(op.outs[0])
    row, inner_a = ndim - 2, ndim - 1
    inner_b, column = (0, None) if lone else (ndim - 2, ndim - 1)
    la, lb = left.layout, right.layout
    if (la is not None and la.dim < row) or (lb is not None and ndim == 3 and lb.dim == 0):
        layout = la or lb
        assert layout is not None
        if any(other not in (None, layout) for other in (la, lb)):
            return None
        return Verdict(outs=(layout,), uses={a: Use(layout), b: Use(layout)})
    if la is not None and lb is None and la.dim == row:
        return Verdict(outs=(la.at(out - 1 if lone else out - 2),), uses={a: Use(la), b: Use()})
    if lb is not None and la is None and lb.dim == column:
        return Verdict(outs=(lb.at(out - 1),), uses={a: Use(), b: Use(lb)})
    summed_a = la is not None and la.dim == inner_a
    summed_b = lb is not None and lb.dim == inner_b
    if summed_a or summed_b:
        layout = la if summed_a else lb
        assert layout is not None
        if (la is not None and not summed_a) or (lb is not None and not summed_b):
            return None
        if la is not None and lb is not None and la.at(0) != lb.at(0):
            return None
        uses = {a: Use(layout.at(inner_a)), b: Use(layout.at(inner_b))}
        return Verdict(reduction=Reduction("sum"), uses=uses)
    return None


@register("mm", "bmm", "mv")
def _mm(op: Op) -> Verdict | None:
    return _contract(op, 0, 1)


@register("dot", "vdot")
def _dot(op: Op) -> Verdict | None:
    layout = op.operands[0].layout or op.operands[1].layout
    if layout is None or any(o.layout not in (None, layout) for o in op.operands):
        return None
    return Verdict(reduction=Reduction("sum"), uses={0: Use(layout), 1: Use(layout)})


@register("addr")
def _addr(op: Op) -> Verdict | None:
    return Verdict(decomposition=_explicit_addr)


def _explicit_addr(base: Tensor, a: Tensor, b: Tensor, beta: Any = 1, alpha: Any = 1) -> Tensor:
    outer: Tensor = alpha * (a.unsqueeze(1) * b.unsqueeze(0))
    return outer if beta == 0 else outer + beta * base


@register("addmm", "addmv", "baddbmm", "addbmm", "_addmm_activation")
def _addmm(op: Op) -> Verdict | None:
    """``beta * input + alpha * a @ b``; with the sum over the batch, input is added once."""
    if op.name == "addbmm":
        return Verdict(decomposition=_explicit_addbmm)
    product = _contract(op, 1, 2)
    if product is None:
        return None
    if product.reduction is not None:
        explicit = _explicit_addmv if op.name == "addmv" else _explicit_addmm
        return Verdict(decomposition=explicit)
    out = product.outs[0]
    assert out is not None
    base = op.operands[0]
    dim = out.dim - (len(op.outs[0]) - base.ndim)
    full = dim >= 0 and base.shape[dim] == axis_size(out, op.n)
    if base.layout is not None and (not full or base.layout != out.at(dim)):
        return None
    uses = {**product.uses, 0: Use(out.at(dim)) if full else Use()}
    return Verdict(outs=(out,), uses=uses)


def _explicit_addmm(base: Tensor, a: Tensor, b: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Tensor:
    product: Tensor = alpha * (a @ b)
    return product if beta == 0 else product + beta * base


_explicit_addmv = _explicit_addmm


def _explicit_addbmm(
    base: Tensor, a: Tensor, b: Tensor, *, beta: Any = 1, alpha: Any = 1
) -> Tensor:
    product: Tensor = alpha * torch.bmm(a, b).sum(0)
    return product if beta == 0 else product + beta * base


@register("convolution_overrideable", "mkldnn_convolution",
          "cudnn_convolution", "miopen_convolution", "slow_conv2d_forward",
          "_slow_conv2d_forward")  # fmt: skip
def convolution(op: Op) -> Verdict | None:
    image = op.operands[0]
    weight = op.operands[1]
    if image.layout is None or not op.only(image.name) or image.ndim != weight.ndim:
        return None
    return split(op, image.layout) if image.layout.dim == 0 else None


_SPATIAL = {
    "1d": 1, "2d": 2, "3d": 3,
}  # fmt: skip


@register("_adaptive_avg_pool2d", "_adaptive_avg_pool3d", "adaptive_avg_pool1d",
          "adaptive_max_pool2d", "adaptive_max_pool3d",
          "avg_pool1d", "avg_pool2d", "avg_pool3d", "max_pool1d",
          "max_pool2d_with_indices", "max_pool3d_with_indices", "max_pool2d", "max_pool3d",
          "mkldnn_max_pool2d", "mkldnn_max_pool3d", "max_pool1d_with_indices",
          "upsample_nearest1d", "_upsample_nearest_exact1d", "upsample_linear1d",
          "upsample_nearest2d", "_upsample_nearest_exact2d", "upsample_bilinear2d",
          "upsample_bicubic2d", "_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa",
          "_upsample_lanczos2d_aa", "upsample_nearest3d", "_upsample_nearest_exact3d",
          "upsample_trilinear3d", "fractional_max_pool2d", "max_unpool2d", "max_unpool3d",
          "max_pool2d_with_indices_backward", "max_pool3d_with_indices_backward",
          "avg_pool2d_backward", "_adaptive_avg_pool2d_backward")  # fmt: skip
def _pool(op: Op) -> Verdict | None:
    """The last d dimensions are space; all before them are independent."""
    spatial = next(d for key, d in _SPATIAL.items() if key in op.name)
    layout = next((o.layout for o in op.operands if o.layout is not None), None)
    if layout is None:
        return None
    uses = {}
    for k, operand in enumerate(op.operands):
        if layout.dim >= operand.ndim - spatial or operand.layout not in (None, layout):
            return None
        if operand.shape[layout.dim] != axis_size(layout, op.n):
            return None
        uses[k] = Use(layout)
    if "unpool" in op.name and layout.dim:
        return None
    return Verdict(outs=(layout,) * len(op.outs), uses=uses)


@register("im2col", "col2im")
def _im2col(op: Op) -> Verdict | None:
    operand = op.operands[0]
    layout = operand.layout
    if layout is None or layout.dim != 0 or operand.ndim != len(op.outs[0]) + (op.name == "im2col"):
        return None
    return split(op, layout)


@register("grid_sampler_2d", "grid_sampler_3d", "grid_sampler")
def _grid_sampler(op: Op) -> Verdict | None:
    layout = op.operands[0].layout or op.operands[1].layout
    if layout is None or layout.dim != 0:
        return None
    if any(operand.layout not in (None, layout) for operand in op.operands):
        return None
    return split(op, layout, uses={0: Use(layout), 1: Use(layout)})


@register("native_layer_norm", "layer_norm", "_fused_rms_norm", "rms_norm")
def _layer_norm(op: Op) -> Verdict | None:
    operand = op.operands[0]
    layout = operand.layout
    if layout is None or not op.only(operand.name):
        return None
    if layout.dim >= operand.ndim - len(op["normalized_shape"]):
        return None
    return split(op, *[layout] * len(op.outs))


@register("native_group_norm")
def _group_norm(op: Op) -> Verdict | None:
    """Statistics within a sample and group; the sizes are passed as numbers."""
    operand = op.operands[0]
    layout = operand.layout
    if layout is None or layout.dim != 0 or not op.only(operand.name):
        return None
    return split(op, layout, layout, layout)


@register("native_batch_norm", "_native_batch_norm_legit", "_native_batch_norm_legit_no_training",
          "_batch_norm_with_update", "cudnn_batch_norm", "miopen_batch_norm")  # fmt: skip
def _batch_norm(op: Op) -> Verdict | None:
    """In evaluation, pointwise with one mean and variance a channel; in training, it mixes."""
    operand = op.operands[0]
    layout = operand.layout
    training = op["training"] if "training" in op.args else not op.name.endswith("no_training")
    if op.name == "_batch_norm_with_update":
        training = True
    if layout is None or layout.dim == 1 or training or not op.only(operand.name):
        return None
    return split(op, layout)


@register("_cdist_forward")
def _cdist(op: Op) -> Verdict | None:
    left, right = op.operands[0], op.operands[1]
    la, lb = left.layout, right.layout
    ndim = left.ndim
    if ndim != right.ndim:
        return None
    if la is not None and lb is not None:
        same = la == lb and la.dim < ndim - 2
        return split(op, la) if same else None
    layout = la or lb
    assert layout is not None
    if layout.dim < ndim - 2:
        other = right if la is not None else left
        if other.shape[layout.dim] != axis_size(layout, op.n):
            return None
        return Verdict(outs=(layout,), uses={0: Use(layout), 1: Use(layout)})
    if layout.dim == ndim - 1:
        return None
    return split(op, layout.at(ndim - 2 if la is not None else ndim - 1))


@register("_pdist_forward")
def _pdist(op: Op) -> Verdict | None:
    return None


@register("_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention",
          "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention",
          "_scaled_dot_product_attention_math", "scaled_dot_product_attention",
          "_scaled_dot_product_fused_attention_overrideable")  # fmt: skip
def _attention(op: Op) -> Verdict | None:
    """Query, key and value ``[B, H, L, D]``: samples and heads are independent."""
    layouts = {o.layout for o in op.operands[:3] if o.layout is not None}
    if len(layouts) != 1:
        return None
    (layout,) = layouts
    assert layout is not None
    ndim = op.operands[0].ndim
    if layout.dim >= ndim - 2:
        return None
    size = axis_size(layout, op.n)
    uses = {k: Use(layout) for k in range(3)}
    if any(operand.shape[layout.dim] != size for operand in op.operands[:3]):
        return None
    for k, operand in enumerate(op.operands[3:], start=3):
        dim = layout.dim - (ndim - operand.ndim)
        full = dim >= 0 and operand.shape[dim] == size
        if operand.layout is not None and (not full or operand.layout != layout.at(dim)):
            return None
        uses[k] = Use(layout.at(dim)) if full else Use()
    outs = []
    for shape in op.outs:
        found = [d for d, s in enumerate(shape) if s == size and layout.dim == d]
        outs.append(layout if found else None)
    return Verdict(outs=tuple(outs), uses=uses)


@register("mkldnn_rnn_layer", "_cudnn_rnn", "_thnn_fused_lstm_cell", "_thnn_fused_gru_cell")
def _recurrent(op: Op) -> Verdict | None:
    """Fused recurrent kernels: rows of ``[T, N, ...]`` or ``[N, ...]`` are independent."""
    if op.name.startswith("_thnn"):
        layout = op.operands[0].layout
        if layout is None or layout.dim != 0:
            return None
        uses = {}
        for k, operand in enumerate(op.operands):
            rows = operand.ndim == 2 and operand.shape[0] == axis_size(layout, op.n)
            if operand.layout is not None and not rows:
                return None
            uses[k] = Use(layout) if rows else Use()
        return Verdict(outs=(layout,) * len(op.outs), uses=uses)
    data = op.operands[0]
    layout = data.layout
    if layout is None or (op["batch_first"] and op.name == "_cudnn_rnn" and layout.dim == 1):
        return None
    if op.name == "_cudnn_rnn":
        return None
    if layout.dim != 1 or op["batch_sizes"]:
        return None
    uses, size = {}, axis_size(layout, op.n)
    for k, operand in enumerate(op.operands):
        if operand.name in ("hx_", "cx_"):
            dim = operand.ndim - 2
            if operand.shape[dim] != size or operand.layout not in (None, layout.at(dim)):
                return None
            uses[k] = Use(layout.at(dim))
        elif operand.layout is not None and k:
            return None
        else:
            uses[k] = Use(layout) if k == 0 else Use()
    outs: list[Layout | None] = []
    for shape in op.outs[:3]:
        dim = len(shape) - 2
        outs.append(layout.at(dim) if dim >= 0 and shape[dim] == size else None)
    return Verdict(outs=tuple(outs) + (None,) * (len(op.outs) - len(outs)), uses=uses)


@register("_trilinear")
def _bilinear(op: Op) -> Verdict | None:
    return None


@register("linear")
def _linear(op: Op) -> Verdict | None:
    """Seen undivided in inference mode: rows of the input are independent."""
    operand = op.operands[0]
    layout = operand.layout
    if layout is None or layout.dim == operand.ndim - 1 or not op.only(operand.name):
        return None
    return split(op, layout)
