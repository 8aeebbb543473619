"""Calls that were met before are recognised by code generated for them.

A training loop records the same calls again and again. The second time a call form is met, a
function is generated that compares a call with it and, if they are alike, makes the recorded
call; no key is built. Each place in a program remembers which call followed it last, so in a loop
the first guess is right.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn

from koila_rl.recording.callinfo import CallInfo
from koila_rl.recording.clock import optimizer_steps
from koila_rl.recording.deferred import WRITES
from koila_rl.recording.kinds import kind_of
from koila_rl.recording.places import Where, caller
from koila_rl.recording.sizes import BatchInt
from koila_rl.recording.tensor import LazyTensor, new_wrapper
from koila_rl.recording.values import Call, Captured, Meta, Node, seeded_since
from koila_rl.recording.writes import join_view

__all__ = ["forget", "remember", "repeat", "restart", "search"]

# Returns what the call returns, or None where it is not alike.
Matcher = Callable[["tuple[Any, ...]", "dict[str, Any] | None", Where], Any]
# Makes the call's results from its tensors and constants, where more is needed than a new tensor.
Maker = Callable[[CallInfo, list[Any], Sequence[Any], Where], Any]

_PLAIN = frozenset({int, bool, str, type(None), torch.dtype, torch.device, torch.layout,
                    torch.memory_format, type(Ellipsis)})  # fmt: skip
_OWNERS = (Tensor, nn.Parameter, nn.Buffer)
_autocast: Any = torch._C._is_any_autocast_enabled
_transforms: Any = torch._C._are_functorch_transforms_active
_grad: Any = torch.is_grad_enabled
_default: Any = torch.get_default_dtype
# Forms of one function: more than any network has layers of different shapes.
_LIMIT = 64
_PLACES = 100_000


class _Form:
    """A call form that has been met before."""

    __slots__ = ("default", "func", "grad", "match")

    def __init__(self, func: Any, match: Matcher) -> None:
        self.func = func
        self.match = match
        self.grad = _grad()
        self.default = _default()


class _Place:
    """A place in a program that has been recorded before: known calls may follow it.

    Places form a tree from the first call after a run. ``next`` is the one that followed last.
    """

    __slots__ = ("following", "form", "next", "where")

    def __init__(self, form: _Form, where: Where) -> None:
        self.form = form
        # File and line of the user's code that was here first.
        self.where = where
        self.following: dict[_Form, _Place] = {}
        self.next: _Place = self


_NOTHING = _Form(None, lambda args, kwargs, where: None)
_forms: dict[Any, list[_Form]] = {}


class _Local(threading.local):
    def __init__(self) -> None:
        self.start = self.place = _Place(_NOTHING, None)
        self.places = 0


_local = _Local()


def repeat(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
    """The results of ``func(*args, **kwargs)`` if it is the known call that follows; else None."""
    place = _local.place.next
    form = place.form
    if (
        form.func is func
        and form.grad is _grad()
        and form.default is _default()
        and not _autocast()
        and not _transforms()
    ):
        result = form.match(args, kwargs, place.where)
        if result is not None:
            _local.place = place
            return result
    return None


def search(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
    """`repeat` among all known calls, where another follows than last time."""
    try:
        forms = _forms.get(func)
    except TypeError:
        return None
    if forms is None or _autocast() or _transforms():
        return None
    grad, default, where = _grad(), _default(), caller()
    for form in reversed(forms):
        if form.grad is grad and form.default is default:
            result = form.match(args, kwargs, where)
            if result is not None:
                _go_on(form, where)
                return result
    return None


def _go_on(form: _Form, where: Where) -> None:
    """Expect ``form`` at this place from now on."""
    place = _local.place
    following = place.following.get(form)
    if following is None:
        _local.places += 1
        if _local.places > _PLACES:
            # Programs that never repeat must not fill the memory.
            _local.__init__()  # type: ignore[misc]
            place = _local.place
        following = place.following[form] = _Place(form, where)
    place.next = _local.place = following


def restart() -> None:
    """A program ends when it runs; what is recorded next begins another."""
    _local.place = _local.start


def forget() -> None:
    """Forget all forms; the analyses they belong to are gone."""
    _forms.clear()
    _local.__init__()  # type: ignore[misc]


def remember(
    info: CallInfo, args: tuple[Any, ...], kwargs: dict[str, Any], metas: list[Meta], make: Maker
) -> None:
    """Recognise calls like this one from now on, if code can tell them from others."""
    if _autocast() or _transforms() or info.mixes or info.writes or info.effect:
        return
    writer = _Writer(info, metas)
    try:
        hash(info.func)
        match = writer.function(args, kwargs, make)
    except (_Unlike, TypeError):
        return
    forms = _forms.setdefault(info.func, [])
    if len(forms) >= _LIMIT:
        del forms[0]
    forms.append(_Form(info.func, match))


class _Unlike(Exception):  # noqa: N818  (not an error: the general way is taken)
    """No code tells this call from others."""


class _Writer:
    """Writes the code of a matcher: conditions, then the call."""

    def __init__(self, info: CallInfo, metas: list[Meta]) -> None:
        self.info, self.metas = info, metas
        self.lines: list[str] = []
        self.names: dict[str, Any] = {
            "Call": Call, "Captured": Captured, "Lazy": LazyTensor, "Node": Node, "info": info,
            "meta": info.metas[0] if info.metas else None, "optimizer_steps": optimizer_steps,
            "pending": WRITES, "kind_of": kind_of, "plainly": plainly_equal,
            "seeded_since": seeded_since, "strided": torch.strided,
            "Size": torch.Size, "BatchInt": BatchInt,
        }  # fmt: skip
        self.tensors: list[tuple[str, Tensor]] = []
        self.consts: list[str] = []
        self.count = 0

    def function(self, args: tuple[Any, ...], kwargs: dict[str, Any], make: Maker) -> Matcher:
        self.sequence("args", args, None)
        if kwargs:
            self.check(f"kwargs and len(kwargs) == {len(kwargs)}")
            for name, value in kwargs.items():
                held = self.name(f"kwargs.get({name!r}, absent)")
                self.argument(held, value)
            self.names["absent"] = object()
        else:
            self.check("not kwargs")
        self.different()
        self.ending(make)
        source = "def match(args, kwargs, where):\n" + "\n".join(f"    {x}" for x in self.lines)
        exec(_code(source), self.names)
        match: Matcher = self.names["match"]
        return match

    def check(self, condition: str) -> None:
        self.lines.append(f"if not ({condition}): return None")

    def name(self, expression: str) -> str:
        self.count += 1
        self.lines.append(f"a{self.count} = {expression}")
        return f"a{self.count}"

    def constant(self, value: Any) -> str:
        self.count += 1
        self.names[f"k{self.count}"] = value
        return f"k{self.count}"

    def sequence(self, held: str, value: Any, kind: type | None) -> None:
        same = f"type({held}) is {kind.__name__} and " if kind is not None else ""
        self.check(f"{same}len({held}) == {len(value)}")
        for k, item in enumerate(value):
            self.argument(self.name(f"{held}[{k}]"), item)

    def argument(self, held: str, value: Any) -> None:
        kind = type(value)
        if isinstance(value, Tensor):
            self.tensor(held, value)
        elif kind is float:
            self.consts.append(held)
            kind_name = self.constant(kind_of(value))
            self.check(f"type({held}) is float and kind_of({held}) == {kind_name}")
        elif kind in _PLAIN:
            # By identity, as most are; equal numbers of another type are other calls.
            fixed, kept = self.constant(value), self.constant(kind)
            self.check(f"{held} is {fixed} or (type({held}) is {kept} and {held} == {fixed})")
        elif kind is BatchInt:
            self.size(held, value)
        elif kind in (tuple, list, slice, torch.Size) and _is_plain(value):
            self.check(f"plainly({held}, {self.constant(value)})")
        elif kind in (tuple, list, torch.Size):
            self.sequence(held, value, kind)
        else:
            raise _Unlike

    def size(self, held: str, value: BatchInt) -> None:
        if value.base not in (0, self.info.n):
            raise _Unlike
        self.check(
            f"type({held}) is BatchInt and {held}.base == {value.base} and {held} == {int(value)}"
            f" and {held}.code == {value.code!r}"
        )

    def tensor(self, held: str, value: Tensor) -> None:
        for other, known in self.tensors:
            if known is value:
                self.check(f"{held} is {other}")
                return
        self.tensors.append((held, value))
        if isinstance(value, LazyTensor):
            meta = self.constant(value._node.meta)
            if value._node.meta is not self.metas[len(self.tensors) - 1]:
                raise _Unlike
            self.check(f"type({held}) is Lazy")
            self.lines.append(f"n{held} = {held}._node")
            self.check(f"n{held}.meta is {meta} and n{held}.attached is None")
            return
        # Whole numbers of N rows may be row numbers.
        rows = not value.is_floating_point() and self.info.n in value.shape
        if (
            type(value) not in _OWNERS
            or value.layout != torch.strided
            or value.is_complex()
            or rows
        ):
            raise _Unlike
        kind, shape, stride = map(self.constant, (type(value), value.shape, value.stride()))
        dtype, device = self.constant(value.dtype), self.constant(value.device)
        self.check(
            f"type({held}) is {kind} and {held}.layout is strided and {held}.shape == {shape} and "
            f"{held}.stride() == {stride} and {held}.dtype is {dtype} and {held}.device == {device}"
            f" and {held}.requires_grad is {value.requires_grad} and not (pending and "
            f"id({held}) in pending)"
        )

    def different(self) -> None:
        """Tensors that could be one must not be: another form has one hole for both."""
        for k, (held, value) in enumerate(self.tensors):
            for other, known in self.tensors[:k]:
                if isinstance(value, LazyTensor) is isinstance(known, LazyTensor):
                    self.lines.append(f"if {held} is {other}: return None")

    def ending(self, make: Maker) -> None:
        """The call, once it is known to be alike."""
        lazy = next((held for held, x in self.tensors if isinstance(x, LazyTensor)), None)
        if lazy is None:
            raise _Unlike
        if self.info.random:
            self.lines.append("if seeded_since(): return None")
        consts = "".join(f"{held}, " for held in self.consts)
        if not (self.info.lone or self.info.view):
            self.names["make"] = make
            held = ", ".join(held for held, _ in self.tensors)
            self.lines.append(f"return make(info, [{held}], [{consts}], where)")
            return
        if any(not isinstance(x, LazyTensor) for _, x in self.tensors):
            self.lines.append("steps = optimizer_steps()")
        inputs = ", ".join(
            f"n{held}" if isinstance(x, LazyTensor) else f"Captured({held}, steps)"
            for held, x in self.tensors
        )
        # As `LazyTensor` makes itself, without the calls in between.
        meta = self.info.metas[0]
        self.names |= {"shape": meta.shape, "stride": meta.stride, "new": new_wrapper}
        self.names |= {"dtype": meta.dtype, "device": meta.device}
        self.lines += [
            f"runtime = {lazy}._runtime",
            "tensor = new(Lazy, shape, strides=stride, dtype=dtype, device=device)",
            f"call = Call(info, [{inputs}], ({consts}), {_grad()}, runtime.checks(), where)",
            "tensor._node, tensor._runtime = Node(call, 0, meta), runtime",
            "runtime.track(tensor)",
        ]
        alias = self.info.aliases[0]
        if alias is not None and isinstance(self.tensors[alias][1], LazyTensor):
            self.names["join"] = join_view
            others = ["None" if k == alias else held for k, (held, _) in enumerate(self.tensors)]
            self.lines.append(f"join({self.tensors[alias][0]}, tensor, info, "
                              f"[{', '.join(others)}], ({consts}), {alias}, 0)")  # fmt: skip
        self.lines.append("return tensor")


# Many forms share their code and differ in what it names.
_codes: dict[str, CodeType] = {}


def _code(source: str) -> CodeType:
    found = _codes.get(source)
    if found is None:
        if len(_codes) > 4096:
            _codes.clear()
        found = _codes[source] = compile(source, "<koila_rl repeat>", "exec")
    return found


def _is_plain(value: Any) -> bool:
    kind = type(value)
    if kind is slice:
        return _is_plain((value.start, value.stop, value.step))
    if kind in (tuple, list, torch.Size):
        return all(_is_plain(item) for item in value)
    return kind in _PLAIN


def plainly_equal(value: Any, other: Any) -> bool:
    """Whether nested plain values are equal, and of equal types: True is no 1 here."""
    kind = type(other)
    if type(value) is not kind:
        return False
    if kind is slice:
        return plainly_equal(
            (value.start, value.stop, value.step), (other.start, other.stop, other.step)
        )
    if kind is tuple or kind is list or kind is torch.Size:
        return len(value) == len(other) and all(map(plainly_equal, value, other))
    return bool(value == other)
