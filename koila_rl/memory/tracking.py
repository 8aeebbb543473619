"""Bytes of live storages, followed under a dispatch mode, for real and for fake tensors."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, UntypedStorage

from koila_rl.memory import bypasses
from koila_rl.memory.live import LiveCall, Moment, Results, StorageListener, Workspaces
from koila_rl.memory.storages import (
    is_fresh,
    may_resize,
    round_to_block,
    storage_of,
    storage_sizes,
    tensors_in,
    wraps_other_tensors,
)
from koila_rl.recording.private import FakeTensor, TorchDispatchMode, backward_node

__all__ = ["LiveCall", "StorageTracker"]


_UNKNOWN = "not made by an operator here"

_DEVICE: Any = torch.ops.prim.device.default


class _Entry(weakref.ref[UntypedStorage]):
    """A weak reference to one storage, with what is counted for it."""

    __slots__ = ("birth", "key", "maker", "nbytes", "node", "raw", "unbilled")

    birth: int  # the tracker's clock when it was counted
    key: int
    maker: object  # operator or label; turned into text only when asked
    nbytes: int  # blocks counted
    node: int | None  # of autograd, that it was made in
    raw: int  # the storage's own size when last seen
    unbilled: int  # blocks that existed at entry and count zero


class StorageTracker(TorchDispatchMode):
    """Context manager: follows the storages that operators make in this thread.

    Counted is every storage that an operator returns while the context is active, in whole
    512-byte blocks, once however many views share it, until it dies. Storages that existed at
    entry, or that :meth:`register` names, count zero; if one of them grows, the growth counts.
    Fake tensors count with the size that they stand for, tensors on ``meta`` count zero.

    What code compiled by ``torch.compile`` allocates counts too, and the code stays compiled.
    Not seen are scratch memory inside a kernel and arrays that ``torch.from_numpy`` wraps. The
    sum of two gradients takes the place of the first where it would without a dispatch mode.

    Args:
        listener: told of every storage counted and freed; may refuse one by raising
            ``torch.OutOfMemoryError``, which leaves the operator's call in place of its result.
        follow_fake: whether fake tensors count.
        note_unknown: add up, as ``unknown_bytes``, the storages that operators are given but
            that are not followed.
        workspaces: what operators take beyond their results; raises ``allocator_peak_bytes``
            above the peak.
        results: takes a call and what it returned, and gives what counts and is returned instead.
        record_timeline: keep a ``Moment`` for each storage made and each use of a workspace.
    """

    supports_higher_order_operators = True

    def __init__(
        self,
        listener: StorageListener | None = None,
        *,
        follow_fake: bool = True,
        note_unknown: bool = False,
        workspaces: Workspaces | None = None,
        results: Results | None = None,
        record_timeline: bool = False,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live_bytes = 0
        """Bytes of the storages counted and alive now."""
        self.peak_bytes = 0
        """Largest ``live_bytes`` since entry or :meth:`reset_peak`."""
        self.allocator_peak_bytes = 0
        """The same with the scratch memory of each call while it runs."""
        self.unknown_bytes = 0
        """With ``note_unknown``: the most bytes seen at once that existed at entry, or that no
        operator made."""
        self.label: object = None
        """If set, names the storages made from here on instead of their operator."""
        self.phase = 0
        """Kept in the timeline; whoever runs the program says what it means."""
        self.passes = 0
        """Counted by whoever runs the program."""
        self.timeline: list[Moment] = []
        self._listener = listener
        self._follow_fake = follow_fake
        self._note_unknown = note_unknown
        self._workspaces = workspaces
        self._results = results
        self._unknown_live = 0
        self._record_timeline = record_timeline
        self._entries: dict[int, _Entry] = {}
        self._on_death = _death_callback(self)
        self._clock = 0
        self._peak_clock = 0
        self._dead_since_peak: list[tuple[object, int]] = []
        self._depth = 0
        self._replaced: tuple[_Entry, int] | None = None

    @classmethod
    def is_infra_mode(cls) -> bool:
        """True, since Dynamo leaves code uncompiled under any other mode."""
        return True

    def register(self, tensors: Iterable[Tensor]) -> None:
        """Count the storages of ``tensors`` as resident, that is zero."""
        for storage in self._storages_to_count(tensors):
            entry = self._entries.get(id(storage))
            if entry is None:
                self._follow(storage, "resident", unbilled=round_to_block(storage.nbytes()))
            else:
                self._unbill(entry)
                entry.unbilled = round_to_block(entry.raw)

    def adopt(self, tensors: Iterable[Tensor], name: str) -> int:
        """Count the storages of ``tensors`` from now on, whoever made them.

        Returns the bytes that were not counted before.
        """
        before = self.live_bytes
        for storage in self._storages_to_count(tensors):
            entry = self._entries.get(id(storage))
            if entry is None:
                self._follow(storage, name)
            elif entry.unbilled:
                self._forget_unknown(entry)
                entry.unbilled, entry.maker = 0, name
                self._bill(entry, round_to_block(entry.raw))
        return self.live_bytes - before

    def reset_peak(self) -> None:
        """Begin a new peak at what is live now."""
        self.allocator_peak_bytes = 0
        self._take_peak()

    def peak_calls(self) -> tuple[LiveCall, ...]:
        """The storages that were live at the peak, largest first."""
        alive = [
            (entry.maker, entry.nbytes)
            for entry in self._entries.values()
            if entry.nbytes and entry.birth <= self._peak_clock
        ]
        calls = [LiveCall(str(maker), nbytes) for maker, nbytes in alive + self._dead_since_peak]
        return tuple(sorted(calls, key=lambda call: -call.nbytes))

    def __enter__(self) -> StorageTracker:
        super().__enter__()  # type: ignore[no-untyped-call]
        self._depth += 1
        if self._depth == 1:
            bypasses.watch(self)
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._recount_survivor()
        self._depth -= 1
        if self._depth == 0:
            bypasses.unwatch(self)
        super().__exit__(*exc_info)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self,
        func: Any,
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is _DEVICE and type(args[0]) is FakeTensor:
            # Autograd asks for it more often than it runs operators.
            return args[0].fake_device
        if any(map(wraps_other_tensors, types)):
            return NotImplemented  # its own handler runs with this mode active, and is seen
        self._recount_survivor()
        kwargs = kwargs or {}
        if self._note_unknown:
            self._note(func, args, kwargs)
        before = storage_sizes(args, kwargs) if may_resize(func) else None
        out = func(*args, **kwargs)
        if self._results is not None:
            out = self._results(func, args, kwargs, out)
        refusal = None
        try:
            self._see(out, func, args, kwargs, before)
        except torch.OutOfMemoryError as error:
            refusal = error.with_traceback(None)
        if refusal is None:
            return out
        # Whoever catches this holds the traceback, and the traceback holds the frames: none of
        # them may hold what was refused.
        del out
        try:
            raise refusal
        finally:
            del refusal

    def _see(
        self,
        out: Any,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        before: dict[int, int] | None,
    ) -> None:
        tensors: Iterable[Tensor]
        if isinstance(out, Tensor):
            tensors = (out,)
        elif isinstance(out, (list, tuple)):
            tensors = tensors_in(*out)
        else:
            tensors = ()
        for tensor in tensors:
            storage = storage_of(tensor)
            if (
                storage is not None
                and id(storage) not in self._entries
                and self._takes_memory(tensor, storage)
                and is_fresh(storage, func, args, kwargs)
            ):
                nbytes = storage.nbytes()
                if func is torch.ops.aten.add.Tensor:
                    self._replace_gradient(args, nbytes)
                self._follow(storage, func)
        if before is not None:
            self._see_resizes(func, args, kwargs, before)
        if self._workspaces is not None:
            scratch = self._workspaces.of(func, args, kwargs, out)
            if scratch:
                needed = self.live_bytes + scratch
                self.allocator_peak_bytes = max(self.allocator_peak_bytes, needed)
                if self._record_timeline:
                    self.timeline.append(Moment(self.live_bytes, scratch, func, self.phase))

    def _replace_gradient(self, args: tuple[Any, ...], nbytes: int) -> None:
        """Let a sum of gradients take the place of the first, as without a dispatch mode.

        Autograd then adds into a gradient that nobody else holds, but adds out of place where a
        mode is active. Told from other additions by the first gradient's coming from an earlier
        node, and by its death before the next operator.
        """
        node = None if torch.is_grad_enabled() else backward_node()
        storage = storage_of(args[0]) if node is not None else None
        entry = self._entries.get(id(storage))
        if entry is None or entry.node in (None, node) or entry.raw != nbytes:
            return
        self._replaced = entry, entry.nbytes
        self._unbill(entry)

    def _recount_survivor(self) -> None:
        if self._replaced is not None:
            (entry, nbytes), self._replaced = self._replaced, None
            if self._entries.get(entry.key) is entry:
                self._bill(entry, nbytes)

    def _see_resizes(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        before: dict[int, int],
    ) -> None:
        for storage in self._storages_to_count(tensors_in(*args, *kwargs.values())):
            self.resized(storage, before.get(id(storage)), func)

    def made(self, tensor: Tensor, maker: str) -> None:
        """Count a storage that no operator made."""
        for storage in self._storages_to_count([tensor]):
            self._follow(storage, maker)

    def resized(self, storage: UntypedStorage, old_size: int | None, maker: object) -> None:
        """Count what a storage has grown or shrunk by; ``None`` where it was not known before."""
        entry = self._entries.get(id(storage))
        if entry is None:
            if old_size is not None and storage.nbytes() > old_size:
                self._follow(storage, maker, unbilled=round_to_block(old_size))
        elif entry.raw != storage.nbytes():
            entry.raw = storage.nbytes()
            self._bill(entry, max(0, round_to_block(entry.raw) - entry.unbilled))

    def _note(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if func is torch.ops.aten.lift_fresh.default:
            return  # what torch.tensor() has just made
        for storage in self._storages_to_count(tensors_in(*args, *kwargs.values())):
            if id(storage) not in self._entries:
                nbytes = round_to_block(storage.nbytes())
                self._follow(storage, _UNKNOWN, unbilled=nbytes)
                self._unknown_live += nbytes
                self.unknown_bytes = max(self.unknown_bytes, self._unknown_live)

    def _storages_to_count(self, tensors: Iterable[Tensor]) -> Iterator[UntypedStorage]:
        for tensor in tensors:
            storage = storage_of(tensor)
            if storage is not None and self._takes_memory(tensor, storage):
                yield storage

    def _takes_memory(self, tensor: Tensor, storage: UntypedStorage) -> bool:
        if storage.device.type != "meta":
            return True
        # A fake tensor's storage is on meta, but the tensor says which device it stands for.
        return self._follow_fake and tensor.device.type != "meta"

    def _follow(
        self,
        storage: UntypedStorage,
        maker: object,
        unbilled: int = 0,
    ) -> None:
        raw = storage.nbytes()
        entry = _Entry(storage, self._on_death)
        entry.key = id(storage)
        entry.maker = maker if self.label is None or isinstance(maker, str) else self.label
        entry.nbytes = 0
        entry.raw, entry.unbilled = raw, unbilled
        entry.node = backward_node()
        entry.birth = self._clock
        self._entries[entry.key] = entry
        try:
            self._bill(entry, max(0, round_to_block(raw) - unbilled))
        except BaseException:
            self._entries.pop(entry.key, None)
            raise

    def _bill(self, entry: _Entry, nbytes: int) -> None:
        """Count ``nbytes`` for the storage from now on."""
        self._unbill(entry)
        if nbytes and self._listener is not None:
            self._listener.allocated(entry.key, nbytes, str(entry.maker))
        self._clock += 1
        entry.birth = self._clock
        entry.nbytes = nbytes
        self.live_bytes += nbytes
        if self.live_bytes > self.peak_bytes:
            self._take_peak()
        if self._record_timeline:
            self.timeline.append(Moment(self.live_bytes, 0, entry.maker, self.phase))

    def _unbill(self, entry: _Entry) -> None:
        if not entry.nbytes:
            return
        if entry.birth <= self._peak_clock:
            self._dead_since_peak.append((entry.maker, entry.nbytes))
        self.live_bytes -= entry.nbytes
        nbytes, entry.nbytes = entry.nbytes, 0
        if self._listener is not None:
            self._listener.freed(entry.key, nbytes)

    def _died(self, entry: _Entry) -> None:
        if self._entries.pop(entry.key, None) is not None:
            self._forget_unknown(entry)
            self._unbill(entry)

    def _forget_unknown(self, entry: _Entry) -> None:
        if entry.maker is _UNKNOWN:
            self._unknown_live -= entry.unbilled

    def _take_peak(self) -> None:
        self.peak_bytes = self.live_bytes
        self.allocator_peak_bytes = max(self.allocator_peak_bytes, self.live_bytes)
        self._peak_clock = self._clock
        self._dead_since_peak.clear()


def _death_callback(tracker: StorageTracker) -> Callable[[weakref.ref[UntypedStorage]], None]:
    # Through a weak reference, or every tracker would be a cycle that waits for the collector.
    follower = weakref.ref(tracker)

    def died(entry: weakref.ref[UntypedStorage]) -> None:
        alive = follower()
        if alive is not None and isinstance(entry, _Entry):
            alive._died(entry)

    return died
