"""Live storages are counted once, in blocks, from the call that makes them to their last use."""

from __future__ import annotations

import gc
import traceback
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from koila_rl.memory.storages import round_to_block
from koila_rl.memory.tracking import StorageTracker
from koila_rl.memory.workspace import allocator_peak
from koila_rl.recording.private import FakeTensorMode

BLOCK = 512


def floats(blocks: int) -> Tensor:
    """A new tensor of so many whole blocks."""
    return torch.ones(blocks * BLOCK // 4)


def test_bytes_are_whole_blocks():
    with StorageTracker() as tracker:
        kept = torch.empty(1), torch.empty(129), torch.empty(0)
    assert tracker.live_bytes == tracker.peak_bytes == BLOCK + 2 * BLOCK
    del kept


def test_views_and_aliases_count_once():
    with StorageTracker() as tracker:
        x = floats(4)
        views = [x.view(2, -1), x[3:], x.detach(), x.t(), *x.chunk(2), x.expand(3, -1)]
        assert tracker.live_bytes == 4 * BLOCK
        del x
        assert tracker.live_bytes == 4 * BLOCK
        views.clear()
        assert tracker.live_bytes == 0
    assert tracker.peak_bytes == 4 * BLOCK


def test_resident_storages_count_zero():
    x, weight = floats(4), nn.Parameter(floats(2))
    with StorageTracker() as tracker:
        views = x.view(2, -1), weight.detach(), x.add_(1), weight.view(-1)
        assert tracker.live_bytes == 0
        y = x * 2
        assert tracker.live_bytes == 4 * BLOCK
        for _ in range(2):
            tracker.register([y, x])
            assert tracker.live_bytes == 0
        del y, views
        assert tracker.live_bytes == 0
    assert tracker.peak_bytes == 4 * BLOCK


def test_adopted_storages_count_once():
    x = floats(4)
    with StorageTracker() as tracker:
        y = x + 1
        assert tracker.adopt([x, x.view(-1), y], "mine") == 4 * BLOCK
        assert tracker.adopt([x], "mine") == 0
        assert tracker.peak_calls() == (("aten.add.Tensor", 4 * BLOCK), ("mine", 4 * BLOCK))
        del x
        assert tracker.live_bytes == 4 * BLOCK
        del y


def test_unknown_storages_are_noted():
    x, unused = floats(4), floats(2)
    with StorageTracker(note_unknown=True) as tracker:
        y = x.view(-1) + 1
        for _ in range(3):
            z = torch.from_numpy(np.ones(BLOCK // 8)) * 2  # each dies before the next
        assert tracker.unknown_bytes == 5 * BLOCK
        assert tracker.adopt([x], "mine") == 4 * BLOCK
        x.mul_(torch.tensor(2.0))
        y = unused + y[0]
        assert tracker.unknown_bytes == 5 * BLOCK
        assert tracker.live_bytes == (4 + 2 + 1) * BLOCK
        del y, z


def test_a_free_is_seen_at_once_also_in_autograd():
    x = floats(3).requires_grad_()
    with StorageTracker() as tracker:
        y = x.exp()
        loss = y.sum()
        del y
        assert tracker.live_bytes == (3 + 1) * BLOCK  # exp keeps its result for backward
        loss.backward()
        del loss
        assert tracker.live_bytes == 3 * BLOCK
        x.grad = None
        assert tracker.live_bytes == 0


def test_gradients_accumulate_in_place_and_count_once():
    x = floats(3).requires_grad_()
    with StorageTracker() as tracker:
        for _ in range(3):
            (x * 2).sum().backward()
        assert tracker.live_bytes == 3 * BLOCK
        torch.autograd.backward(x.sum() + x.cumsum(0).sum())
        assert tracker.live_bytes == 3 * BLOCK


def test_sums_of_gradients_take_the_place_of_the_first():
    """As without a dispatch mode, which makes autograd add out of place."""
    x = floats(64).requires_grad_()

    def update() -> None:
        h = x * 1
        results = [-h, h * 2, h.flip(0)]
        torch.autograd.grad(results, x, [torch.ones_like(result) for result in results])

    with StorageTracker() as tracker:
        update()
    assert tracker.peak_bytes == pytest.approx(allocator_peak(update)[0], abs=8 * BLOCK)
    assert tracker.live_bytes == 0


class Kept(torch.autograd.Function):
    """Adds its gradient out of place to something and keeps it, which is not autograd's sum."""

    kept: ClassVar[list[Tensor]] = []

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        Kept.kept.append(gradient)
        return gradient + gradient


def test_a_gradient_that_lives_on_still_counts():
    x = floats(64).requires_grad_()
    with StorageTracker() as tracker:
        (gradient,) = torch.autograd.grad((Kept.apply(x) * floats(64)).sum(), x)
        gradient = gradient * 2
        assert tracker.live_bytes == 2 * 64 * BLOCK  # beside the gradient that was kept
        assert tracker.peak_bytes == 3 * 64 * BLOCK
        Kept.kept.clear()
        assert tracker.live_bytes == 64 * BLOCK
        del gradient
    with StorageTracker() as tracker:
        (gradient,) = torch.autograd.grad((Kept.apply(x) * 2).sum(), x)
    assert tracker.live_bytes == 2 * 64 * BLOCK
    Kept.kept.clear()
    assert tracker.live_bytes == 64 * BLOCK
    del gradient


def test_undefined_gradients_and_several_outputs():
    x = floats(2).requires_grad_()
    unused = floats(2).requires_grad_()
    with StorageTracker() as tracker:
        values, indices = x.view(2, -1).sort(1)
        low, high = torch.autograd.grad(values.sum(), [x, unused], allow_unused=True)
        assert high is None
        assert tracker.live_bytes == (2 + 4 + 2) * BLOCK  # int64 indices take twice the bytes
        del values, indices, low
    assert tracker.live_bytes == 0


@pytest.mark.parametrize("grow", ["operator", "storage", "out"])
def test_growing_counts_and_shrinking_frees(grow: str):
    resident = floats(2)
    with StorageTracker() as tracker:
        fresh = floats(1)
        for tensor in (resident, fresh):
            _resize(tensor, 6, grow)
        assert tracker.live_bytes == (4 + 6) * BLOCK
        if grow != "out":  # resize_ itself never gives memory back
            for tensor in (resident, fresh):
                tensor.untyped_storage().resize_(0)
            assert tracker.live_bytes == 0
        del tensor, resident, fresh
        assert tracker.live_bytes == 0


def _resize(tensor: Tensor, blocks: int, how: str) -> None:
    if how == "operator":
        tensor.resize_(blocks * BLOCK // 4)
    elif how == "storage":
        tensor.untyped_storage().resize_(blocks * BLOCK)
    else:
        tensor.resize_(0)
        torch.add(torch.zeros(()).expand(blocks * BLOCK // 4), 1, out=tensor)


def test_new_data_counts_and_wrapped_arrays_do_not():
    with StorageTracker() as tracker:
        tensor = torch.tensor([1.0, 2.0])
        assert tracker.live_bytes == BLOCK
        wrapped = torch.from_numpy(np.ones(1000))
        assert tracker.live_bytes == BLOCK
        copied = wrapped.float()
        assert tracker.live_bytes == BLOCK + round_to_block(4000)
        del copied, tensor


def test_data_swapped_under_a_tensor():
    x = floats(4)
    with StorageTracker() as tracker:
        x.data = floats(2)
        assert tracker.live_bytes == 2 * BLOCK
        x.data = floats(3)
        assert tracker.live_bytes == 3 * BLOCK


def test_meta_counts_zero_and_fakes_count():
    with StorageTracker() as tracker:
        kept = [torch.empty(1 << 40, device="meta") * 2]
        assert tracker.live_bytes == 0
        with FakeTensorMode():
            kept.append(floats(2) * 2)
            kept.append(torch.empty(1 << 40, device="meta") * 2)
        assert tracker.live_bytes == 2 * BLOCK
    with StorageTracker(follow_fake=False) as real_only, FakeTensorMode():
        kept.append(floats(2) * 2)
        assert real_only.live_bytes == 0
    del kept


def test_functorch_wrappers_are_seen_through():
    x = torch.randn(8, BLOCK // 4)
    with StorageTracker() as tracker:
        grads = torch.func.vmap(torch.func.grad(lambda row: row.exp().sum()))(x)
        assert tracker.live_bytes == 8 * BLOCK
        del grads
        assert tracker.live_bytes == 0
    assert tracker.peak_bytes > 8 * BLOCK


class Boxed(Tensor):
    """A wrapper that computes on the tensor inside, as quantized or sharded tensors do."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Boxed:
        made = Tensor._make_wrapper_subclass(cls, inner.shape, dtype=torch.float16)
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        opened = [a.inner if isinstance(a, Boxed) else a for a in args]
        return Boxed(func(*opened, **(kwargs or {})))


def test_wrapper_subclasses_are_seen_inside():
    boxed = Boxed(floats(2))  # says that it has half precision, but holds floats
    with StorageTracker() as tracker:
        result = boxed + 1
        assert tracker.live_bytes == 2 * BLOCK
        del result
        assert tracker.live_bytes == 0


class Recorder:
    """A listener that refuses what passes its limit."""

    def __init__(self, limit: int) -> None:
        self.limit, self.live, self.names = limit, {}, []

    def allocated(self, key: int, nbytes: int, name: str) -> None:
        if sum(self.live.values()) + nbytes > self.limit:
            raise torch.OutOfMemoryError(name)
        self.live[key] = nbytes
        self.names.append(name)

    def freed(self, key: int, nbytes: int) -> None:
        assert self.live.pop(key) == nbytes


def test_a_listener_follows_and_may_refuse():
    recorder = Recorder(4 * BLOCK)
    with StorageTracker(recorder) as tracker:
        x = floats(3)
        assert _refusal_of_doubling(x) == ("aten.mul.Tensor", {id(x)})
        assert sum(recorder.live.values()) == tracker.live_bytes == 3 * BLOCK
        del x
        x = floats(4)
        assert sum(recorder.live.values()) == tracker.live_bytes == 4 * BLOCK
        x.untyped_storage().resize_(0)
        assert recorder.live == {}
    assert recorder.names == ["aten.ones.default"] * 2


def _refusal_of_doubling(x: Tensor) -> tuple[str, set[int]] | None:
    # Not in pytest.raises(), which would keep the refused call's frames, and so x, alive.
    try:
        x * 2
    except torch.OutOfMemoryError as error:
        return str(error), _tensors_held(error)
    return None


def _tensors_held(error: BaseException) -> set[int]:
    """The tensors that the frames of a traceback below the caller keep alive."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)][1:]
    values = [value for frame in frames for value in frame.f_locals.values()]
    inside = [item for value in values if isinstance(value, tuple) for item in value]
    return {id(value) for value in values + inside if isinstance(value, Tensor)}


def test_labels_and_timeline():
    with StorageTracker(record_timeline=True) as tracker:
        tracker.label = "conv2d"
        x = floats(3)
        tracker.label = None
        y = x * 2
    assert tracker.peak_calls() == (("conv2d", 3 * BLOCK), ("aten.mul.Tensor", 3 * BLOCK))
    moments = [(x.live_bytes, x.scratch_bytes, str(x.maker)) for x in tracker.timeline]
    assert moments == [(3 * BLOCK, 0, "conv2d"), (6 * BLOCK, 0, "aten.mul.Tensor")]
    del y


def test_peak_starts_anew():
    with StorageTracker() as tracker:
        x = floats(3)
        del x
        kept = floats(1)
        assert tracker.peak_bytes == 3 * BLOCK
        assert tracker.peak_calls() == (("aten.ones.default", 3 * BLOCK),)
        tracker.reset_peak()
        assert tracker.peak_bytes == BLOCK
        assert tracker.peak_calls() == (("aten.ones.default", BLOCK),)
        del kept


def test_trackers_nest_and_need_no_collector():
    gc.disable()
    try:
        with StorageTracker() as outer:
            x = floats(1)
            with StorageTracker() as inner:
                y = x + 1
            assert inner.live_bytes == BLOCK
            assert outer.live_bytes == 2 * BLOCK
            del inner, x, y
            assert outer.live_bytes == 0
    finally:
        gc.enable()


@pytest.mark.filterwarnings("ignore")  # Dynamo's own deprecations
def test_compiled_code_stays_compiled():
    graphs = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(lambda x: x.exp() * 2, backend=backend)
    x = floats(4)
    with StorageTracker() as tracker:
        y = compiled(x)
        assert len(graphs) == 1
        tracker.reset_peak()
        y = compiled(x)
        assert len(graphs) == 1
        assert tracker.live_bytes == 4 * BLOCK
    assert torch.equal(y, x.exp() * 2)
