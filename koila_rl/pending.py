"""What lazy tensors ask for: values, gradients, hooks, and the list of those still alive."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from koila_rl import foresight, session
from koila_rl.backward import run_backward
from koila_rl.errors import ConfigurationError
from koila_rl.recording.private import FakeTensor
from koila_rl.recording.recorder import record
from koila_rl.recording.tensor import LazyTensor
from koila_rl.recording.values import Call, Node, Source, meta_of
from koila_rl.recording.writes import node_of

__all__ = ["PENDING", "Pending"]


Check = tuple[Node, str]
# Calls for which a validation is held whatever becomes of them, and validations kept.
_HELD, _MOST = 8, 64


class Carried(list[Check]):
    """Validations that calls carry to their run; calls recorded in a row share one object."""


class _Local(threading.local):
    def __init__(self) -> None:
        self.live: list[weakref.ref[LazyTensor]] = []
        self.limit = 256
        self.checks: list[tuple[weakref.ref[Node], str]] = []
        # Held for the next few calls, and what calls carry while they live.
        self.fresh: list[Check] = []
        self.left = 0
        self.carried: weakref.ref[Carried] | None = None


class Pending:
    """The runtime handed to every lazy tensor."""

    def __init__(self) -> None:
        self._local = _Local()
        # Losses whose backward runs in slices just now.
        self.sliced: weakref.WeakSet[Node] = weakref.WeakSet()

    def track(self, tensor: LazyTensor) -> None:
        """Remember a result without keeping it alive."""
        local = self._local
        local.live.append(weakref.ref(tensor))
        if len(local.live) > local.limit:
            local.live = [ref for ref in local.live if ref() is not None]
            local.limit = max(256, 2 * len(local.live))

    def live(self) -> session.Live:
        """Recorded results that somebody still holds and that have no value yet."""
        local = self._local
        found: dict[int, Node] = {}
        kept = []
        for ref in local.live:
            tensor = ref()
            if tensor is None:
                continue
            node = tensor._node
            if node.attached is None and isinstance(node.call, Call):
                kept.append(ref)
                if node.value is None:
                    found[id(node)] = node
        local.live = kept
        checks = [(x, message) for ref, message in local.checks if (x := ref()) is not None]
        return session.Live(list(found.values()), checks)

    def value(self, node: Node) -> Tensor:
        """The value of the whole minibatch, without a graph; computed once."""
        if node.value is None:
            if node.attached is not None:
                node.value = node.attached.detach()
            elif isinstance(node.call, Source):
                node.value = session.source_tensor(node).detach()
            elif not foresight.is_expected(node) or not foresight.compute_along(node, self.live()):
                session.run_values(node, self.live())
                foresight.note_reading(node)
        assert node.value is not None
        return node.value

    def attached(self, node: Node) -> Tensor:
        """The value of the whole minibatch with its graph, as in eager PyTorch."""
        if node.attached is None:
            if isinstance(node.call, Source):
                return session.source_tensor(node)
            session.run_graph([node], self.live())
        assert node.attached is not None
        return node.attached

    def backward(
        self,
        node: Node,
        gradient: Tensor | None = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        inputs: Any = None,
    ) -> None:
        """``Tensor.backward`` of a recorded value."""
        self.refuse_sliced(node)
        if isinstance(gradient, LazyTensor):
            gradient = self.attached(gradient._node)
        if inputs is not None:
            many = [inputs] if isinstance(inputs, Tensor) else list(inputs)
            inputs = [self.attached(x._node) if isinstance(x, LazyTensor) else x for x in many]
        if create_graph:
            session.drop_compiled([node])
        if node.attached is None and isinstance(node.call, Call):
            foresight.note_backward(node)
            keep = bool(retain_graph) or inputs is not None
            foresight.take(node, gradient is None and not keep and not create_graph)
        if node.attached is None and isinstance(node.call, Call):
            gradient = run_backward(node, gradient, create_graph, keep, self.live())
        self.attached(node).backward(gradient, retain_graph, create_graph, inputs=inputs)

    def refuse_sliced(self, node: Node) -> None:
        """A second backward of a loss would add its gradients twice."""
        if node in self.sliced:
            raise ConfigurationError(
                "start_backward() runs the backward of this loss already; finish() or cancel() it"
            )

    def backward_many(
        self,
        roots: Sequence[Tensor],
        grads: Sequence[Tensor | None] | None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        grad_variables: Any = None,
        inputs: Any = None,
    ) -> None:
        """``torch.autograd.backward`` of several values, recorded or real."""
        if len(roots) == 1 and isinstance(roots[0], LazyTensor):
            gradient = grads[0] if grads is not None else None
            self.backward(roots[0]._node, gradient, retain_graph, create_graph, inputs)
            return
        if create_graph:
            session.drop_compiled(x._node for x in roots if isinstance(x, LazyTensor))
        pending = [x._node for x in roots
                   if isinstance(x, LazyTensor) and x._node.attached is None
                   and isinstance(x._node.call, Call)]  # fmt: skip
        if pending:
            session.run_graph(pending, self.live(), whole=create_graph)
        real = [self.attached(x._node) if isinstance(x, LazyTensor) else x for x in roots]
        if grads is not None:
            grads = [self.attached(g._node) if isinstance(g, LazyTensor) else g for g in grads]
        torch.autograd.backward(real, grads, retain_graph, create_graph, inputs=inputs)

    def gradients(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], options: Any) -> Any:
        """``torch.autograd.grad`` with recorded outputs or inputs."""
        again = bool(options.get("create_graph") or options.get("is_grads_batched"))
        if again:
            session.drop_compiled(x._node for x in outputs if isinstance(x, LazyTensor))
        pending = [x._node for x in (*outputs, *inputs)
                   if isinstance(x, LazyTensor) and x._node.attached is None
                   and isinstance(x._node.call, Call)]  # fmt: skip
        if pending:
            inner = [x for x in inputs if isinstance(x, LazyTensor) and x._node in pending]
            session.run_graph(
                pending,
                session.Live(),
                whole=again,
                cuts=inner,
            )
        real = [self.attached(x._node) if isinstance(x, LazyTensor) else x for x in outputs]
        leaves = [self.attached(x._node) if isinstance(x, LazyTensor) else x for x in inputs]
        rest = {k: v for k, v in options.items() if k not in ("outputs", "inputs")}
        grads = rest.get("grad_outputs")
        if grads is not None:
            many = [grads] if isinstance(grads, Tensor) else list(grads)
            rest["grad_outputs"] = [
                self.attached(g._node) if isinstance(g, LazyTensor) else g for g in many
            ]
        return torch.autograd.grad(real, leaves, **rest)

    def hook(self, tensor: LazyTensor, hook: Any) -> Any:
        """A hook makes its value a cut: it must see the gradient of the whole minibatch, once."""
        node = tensor._node
        if isinstance(node.call, Source) and node.call.data is not None:
            return node.call.data.register_hook(hook)
        holder = HookHandle(hook)
        tensor._node = node_of(record(attach_hook, (tensor, holder), {}))
        return holder

    def retain(self, tensor: LazyTensor) -> None:
        kept: dict[str, Tensor] = {}

        def keep(grad: Tensor) -> None:
            kept["grad"] = kept["grad"] + grad if "grad" in kept else grad

        self.hook(tensor, keep)
        tensor._retained = kept  # type: ignore[attr-defined]

    def leaf(self, node: Node, flag: bool) -> Node:
        """``requires_grad_()``: only values that are leaves may change the flag."""
        if not isinstance(node.call, Source) and node.meta.requires_grad:
            raise RuntimeError(
                "you can only change requires_grad flags of leaf variables. If you want to use a "
                "computed variable in a subgraph that doesn't require differentiation use "
                "var_no_grad = var.detach()."
            )
        data = self.value(node).detach().requires_grad_(flag)
        meta = meta_of(data, node.meta.n, node.meta.layout)
        return Node(Source(data, None, meta), 0, meta)

    def defer_check(self, tensor: LazyTensor, message: str) -> None:
        """Remember a validation; the calls recorded from here on carry it to their run."""
        local = self._local
        local.fresh.append((tensor._node, message))
        local.left = _HELD
        local.checks = [ref for ref in local.checks[-_MOST:] if ref[0]() is not None]
        local.checks.append((weakref.ref(tensor._node), message))
        local.carried = None

    def checks(self) -> Sequence[Check]:
        """The validations that a new call must carry.

        The calls recorded next hold them, and then only values of the program do. A call may
        turn out to return its input and be dropped, so a few hold them at first.
        """
        local = self._local
        if not local.checks:
            return ()
        if local.left:
            local.left -= 1
            if not local.left:
                local.fresh = []
        carried = local.carried() if local.carried is not None else None
        if carried is None:
            local.checks = [ref for ref in local.checks if ref[0]() is not None]
            carried = Carried((node, message) for ref, message in local.checks
                              if (node := ref()) is not None and node.value is None)  # fmt: skip
            local.carried = weakref.ref(carried)
        return carried

    def eager(self, name: str) -> None:
        session.note_eager(name)


class HookHandle:
    """What ``register_hook`` of a recorded value returns."""

    def __init__(self, hook: Any) -> None:
        self.hook = hook

    def remove(self) -> None:
        self.hook = None

    def __call__(self, grad: Tensor) -> Any:
        return self.hook(grad) if self.hook is not None else None


def attach_hook(x: Tensor, holder: HookHandle) -> Tensor:
    """The same value with a hook on its gradient; needs the whole minibatch."""
    y = x.view_as(x)
    if y.requires_grad and not isinstance(y, FakeTensor):
        y.register_hook(holder)
    return y


attach_hook.mixes = True  # type: ignore[attr-defined]
attach_hook.cheap = True  # type: ignore[attr-defined]

PENDING = Pending()
