"""The arguments of a recorded call as a template: nested containers with holes.

A template is what two calls of the same form share. Its holes are tensors (`Ref`), floats
and unhashable objects (`Const`: rebound at every call, so that an annealed learning constant
is not a new program) and batch sizes (`BatchInt`: follow the microbatch).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from koila_rl.recording.sizes import BatchInt

__all__ = [
    "Const",
    "Ref",
    "Slots",
    "counted",
    "fill",
    "flatten",
    "holes",
    "integers",
    "key_of",
    "replace_integers",
    "settled",
]


@dataclass(frozen=True, slots=True)
class Ref:
    """The k-th tensor of the call."""

    k: int


@dataclass(frozen=True, slots=True)
class Const:
    """The k-th rebound constant of the call."""

    k: int
    type: type


@dataclass(slots=True)
class Slots:
    """What fills the holes of a template: tensors in order of appearance, and constants.

    ``bases`` are the minibatch sizes that sizes among the arguments belong to.
    """

    tensors: list[Any]
    consts: list[Any]
    bases: tuple[int, ...] = ()


_PLAIN = (int, bool, str, type(None), torch.dtype, torch.device, torch.layout,
          torch.memory_format, type(Ellipsis), complex, type)  # fmt: skip


def flatten(tree: Any, slots: Slots, seen: dict[int, int]) -> Any:
    """The template of ``tree``; fills ``slots``. One tensor met twice is one hole."""
    if isinstance(tree, Tensor):
        k = seen.get(id(tree))
        if k is None:
            k = seen[id(tree)] = len(slots.tensors)
            slots.tensors.append(tree)
        return Ref(k)
    kind = type(tree)
    if kind is float:
        slots.consts.append(tree)
        return Const(len(slots.consts) - 1, float)
    if kind in _PLAIN:
        return tree
    if kind is BatchInt:
        slots.bases = (*slots.bases, tree.base)
        return tree
    if kind is tuple or kind is list or kind is torch.Size:
        items = [flatten(item, slots, seen) for item in tree]
        return items if kind is list else tuple(items)
    if kind is dict:
        return {name: flatten(item, slots, seen) for name, item in tree.items()}
    if kind is slice:
        return slice(*(flatten(x, slots, seen) for x in (tree.start, tree.stop, tree.step)))
    if isinstance(tree, tuple):
        return rebuilt(kind, [flatten(item, slots, seen) for item in tree])
    if kind.__module__ == "numpy" and hasattr(tree, "__array__") and tree.dtype.kind in "biuf":
        # An array may be written meanwhile; eager takes its content at once.
        return flatten(torch.tensor(tree) if tree.ndim else tree.item(), slots, seen)
    slots.consts.append(tree)
    return Const(len(slots.consts) - 1, kind)


def holes(tree: Any, tensors: list[Tensor]) -> Any:
    """A structure of results with a hole for each tensor, met twice or not; lists them."""
    kind = type(tree)
    if isinstance(tree, Tensor):
        tensors.append(tree)
        return Ref(len(tensors) - 1)
    if kind is tuple or kind is list:
        return kind(holes(item, tensors) for item in tree)
    if kind is dict:
        return {name: holes(item, tensors) for name, item in tree.items()}
    if isinstance(tree, tuple) and kind is not torch.Size:
        return rebuilt(kind, [holes(item, tensors) for item in tree])
    return tree


def fill(template: Any, tensors: Sequence[Any], consts: Sequence[Any], n: int) -> Any:
    """The arguments again, with ``tensors`` and ``consts`` in the holes, for n samples."""
    kind = type(template)
    if kind is Ref:
        return tensors[template.k]
    if kind is Const:
        return consts[template.k]
    if kind is BatchInt:
        return template.value(n)
    if kind is tuple or kind is list:
        return kind(fill(item, tensors, consts, n) for item in template)
    if kind is dict:
        return {name: fill(item, tensors, consts, n) for name, item in template.items()}
    if kind is slice:
        return slice(*(fill(x, tensors, consts, n) for x in _parts(template)))
    if isinstance(template, tuple):
        return rebuilt(kind, [fill(item, tensors, consts, n) for item in template])
    return template


def rebuilt(kind: Any, items: list[Any]) -> Any:
    """A tuple subclass of other items: named tuples take them apart, torch's results whole."""
    return kind(*items) if hasattr(kind, "_fields") else kind(items)


def _parts(item: slice) -> tuple[Any, Any, Any]:
    return item.start, item.stop, item.step


def key_of(template: Any) -> Any:
    """A hashable key: templates with equal keys record the same call."""
    kind = type(template)
    if kind is BatchInt:
        return ("n", template.code)
    if kind is tuple or kind is list:
        return (kind, *[key_of(item) for item in template])
    if kind is dict:
        return (kind, *[(name, key_of(item)) for name, item in template.items()])
    if kind is slice:
        return (kind, *[key_of(x) for x in _parts(template)])
    if isinstance(template, tuple):
        return (kind, *[key_of(item) for item in template])
    return (kind, template)


def settled(template: Any, n: int) -> Any:
    """The template with sizes of another minibatch than that of n samples as plain numbers."""
    return _replace_sizes(template, lambda size: size if size.base in (0, n) else int(size))


def counted(template: Any, n: int) -> Any:
    """The template with all sizes as the plain numbers that they are for n samples."""
    return _replace_sizes(template, lambda size: size.value(n))


def _replace_sizes(template: Any, change: Callable[[BatchInt], int]) -> Any:
    kind = type(template)
    if kind is BatchInt:
        return change(template)
    if kind is tuple or kind is list:
        return kind(_replace_sizes(item, change) for item in template)
    if kind is dict:
        return {name: _replace_sizes(item, change) for name, item in template.items()}
    if kind is slice:
        return slice(*(_replace_sizes(x, change) for x in _parts(template)))
    return template


def integers(template: Any) -> list[int]:
    """The plain integers of a template, in order."""
    found: list[int] = []

    def note(value: int) -> int:
        found.append(value)
        return value

    replace_integers(template, note)
    return found


def replace_integers(template: Any, change: Callable[[int], int]) -> Any:
    """The template with every plain integer replaced by ``change(integer)``."""
    kind = type(template)
    if kind is int:
        return change(template)
    if kind is tuple or kind is list:
        return kind(replace_integers(item, change) for item in template)
    if kind is dict:
        return {name: replace_integers(item, change) for name, item in template.items()}
    if kind is slice:
        return slice(*(replace_integers(x, change) for x in _parts(template)))
    return template
