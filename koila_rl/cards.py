"""What an agent's update would take on a card of some size, without one.

The agent is made on the CPU, and its own loss is recorded on a minibatch of rows that nobody
stores; the planner then answers for a device of the card's size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor, nn

import koila_rl
from koila_rl.agents.base import BaseAgent
from koila_rl.agents.dqn import DQN
from koila_rl.agents.ppo import PPO
from koila_rl.agents.recurrent_ppo import RecurrentPPO
from koila_rl.envs import EnvironmentLike
from koila_rl.errors import ConfigurationError, InsufficientMemoryError, UnsupportedError
from koila_rl.memory.budget import active_device, format_bytes, parse_bytes
from koila_rl.memory.cuda import CONTEXT_BYTES, Difference, differences_in
from koila_rl.memory.live import short_name
from koila_rl.memory.storages import round_to_block
from koila_rl.wrapping import lazy_rows

__all__ = ["CardPlan", "plan_on_card"]


@dataclass(frozen=True)
class CardPlan:
    """All that an update takes of a card. Sizes in bytes."""

    card_bytes: int
    device: str
    parameters_bytes: int
    """Of all networks, with their buffers."""
    optimizer_bytes: int
    """Once the optimizer has stepped."""
    context_bytes: int
    """Assumed of the driver's context on CUDA; no tensor."""
    plan: koila_rl.Plan
    rows: tuple[tuple[int, koila_rl.Plan | None], ...]
    """Minibatch sizes around the one asked for, each with its plan; None where it does not fit."""
    differences: tuple[Difference, ...]
    """What in the program takes other memory on CUDA than in the trace on a CPU."""

    @property
    def resident_bytes(self) -> int:
        return self.parameters_bytes + self.optimizer_bytes + self.context_bytes

    @property
    def total_bytes(self) -> int:
        return self.resident_bytes + self.plan.peak_bytes

    def __str__(self) -> str:
        parts = [
            ("parameters", self.parameters_bytes),
            ("optimizer", self.optimizer_bytes),
            ("update, with gradients", self.plan.peak_bytes),
        ]
        if self.context_bytes:
            parts.append(("CUDA context (assumed)", self.context_bytes))
        lines = [
            f"{self.device} of {format_bytes(self.card_bytes)}, in all "
            f"{format_bytes(self.total_bytes)}:"
        ]
        lines += [f"  {name:<24}{format_bytes(nbytes):>12}" for name, nbytes in parts]
        lines += [
            "",
            str(self.plan),
            "",
            f"  {'minibatch':>12}  {'runs as':<20}{'of the card':>12}",
        ]
        for size, plan in self.rows:
            how, taken = "does not fit", ""
            if plan is not None:
                count, microbatch = plan.passes[0].count, plan.microbatch_size
                how = "whole" if count == 1 else f"{count:,} × {microbatch:,}"
                taken = format_bytes(self.resident_bytes + plan.peak_bytes)
            lines.append(f"  {size:>12,}  {how:<20}{taken:>12}")
        if self.differences:
            lines += ["", "Traced on a CPU, not measured on CUDA, where these differ:"]
            lines += [f"  {x.what}: {x.on_cuda}; planned {x.planned}" for x in self.differences]
        return "\n".join(lines)


def plan_on_card(
    env: EnvironmentLike,
    agent: type[BaseAgent],
    batch_size: int,
    card: str | int,
    device: str = "cuda",
    env_kwargs: dict[str, Any] | None = None,
    **hyperparameters: Any,
) -> CardPlan:
    """Plan one update of ``batch_size`` samples on a card; nothing is computed.

    Args:
        env: as for ``koila_rl.train``.
        agent: the agent's class.
        batch_size: samples of a minibatch.
        card: all memory of the device, such as ``"8GiB"``.
        device: ``"cuda"`` or ``"cpu"``; it need not exist here.
        env_kwargs: for the environment, where it is a name.
        hyperparameters: of the agent.

    Raises:
        ConfigurationError: an argument cannot be used.
        InsufficientMemoryError: the networks alone, or one sample, do not fit.
        UnsupportedError: the agent's update cannot be planned so.
    """
    kind = device.split(":")[0]
    if kind not in ("cuda", "cpu"):
        raise ConfigurationError(f"device is {device!r}; a card can be planned for cuda or cpu")
    if batch_size < 2:
        raise ConfigurationError(f"batch_size is {batch_size} but must be at least 2")
    card_bytes = parse_bytes(card)
    learner = agent(env, env_kwargs=env_kwargs, device="cpu", **hyperparameters)
    assert learner.env is not None
    try:
        loss = _loss_of(learner)
        parameters, optimizer = _resident(learner)
        context = CONTEXT_BYTES if kind == "cuda" else 0
        free = card_bytes - parameters - optimizer - context
        if free <= 0:
            raise InsufficientMemoryError(
                f"parameters take {format_bytes(parameters)}, the optimizer "
                f"{format_bytes(optimizer)} and the context {format_bytes(context)}, but the card "
                f"has {format_bytes(card_bytes)}; nothing is left for an update"
            )
        with _card(card_bytes, free):
            plan = _planned(loss, batch_size)
            sizes = sorted({max(2, batch_size // 16), max(2, batch_size // 4), batch_size,
                            4 * batch_size})  # fmt: skip
            rows = tuple((n, plan if n == batch_size else _or_none(loss, n)) for n in sizes)
            names = {short_name(moment.maker) for moment in plan.trace().timeline}
    finally:
        learner.env.close()
    found = differences_in(names) if kind == "cuda" else ()
    return CardPlan(card_bytes, device, parameters, optimizer, context, plan, rows, found)


@dataclass
class _Card:
    """A device that answers for itself; nothing is ever on it."""

    capacity_bytes: int
    free_bytes: int


@contextmanager
def _card(capacity: int, free: int) -> Iterator[None]:
    token = active_device.set(_Card(capacity, free))
    try:
        yield
    finally:
        active_device.reset(token)


class _BlankRows:
    """Rows that nobody stores and nobody reads."""

    dim, raw_bytes, prefetch = 0, 0, None

    def __init__(self, n: int, one: Tensor) -> None:
        self.shape, self.dtype = torch.Size([n, *one.shape]), one.dtype
        self.device = one.device

    def read(self, start: int, stop: int, ahead: Any = None) -> Tensor:
        return torch.zeros((stop - start, *self.shape[1:]), dtype=self.dtype)

    def check(self) -> None:
        """Never overwritten."""


def _blank(n: int, one: Any) -> Any:
    """A lazy minibatch of n samples like ``one``."""
    if isinstance(one, Tensor):
        return lazy_rows(_BlankRows(n, one))
    return {name: _blank(n, value) for name, value in one.items()}


def _loss_of(learner: BaseAgent) -> Callable[[int], Tensor]:
    """The loss of a minibatch of n samples, recorded."""
    assert learner.env is not None
    space, interface = learner.interface.observation_space, learner.interface
    batched, _ = interface.batch(space.sample())
    observation = _first(interface.tensor(batched))
    number, flag = torch.zeros(()), torch.zeros((), dtype=torch.bool)
    if isinstance(learner, RecurrentPPO) or not isinstance(learner, (PPO, DQN)):
        raise UnsupportedError(f"a card cannot be planned for {type(learner).__name__} yet")
    if isinstance(learner, PPO):
        with torch.no_grad():
            action, _ = learner.decide(interface.tensor(batched))
        one = {
            "observation": observation, "action": action[0], "action_log_prob": number,
            "advantage": number, "state_value": number, "value_target": number,
        }  # fmt: skip
        ppo: PPO = learner
        return lambda n: ppo.loss(TensorDict(_blank(n, one), batch_size=[n]), 1.0)[0]
    following = {"observation": observation, "reward": number, "terminated": flag,
                 "discount": number}  # fmt: skip
    row = {
        "observation": observation, "action": torch.zeros((), dtype=torch.int64),
        "weight": number, "next": following,
    }  # fmt: skip
    dqn: DQN = learner
    return lambda n: dqn.loss(TensorDict(_blank(n, row), batch_size=[n]))[0]


def _first(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value[0]
    return {name: _first(item) for name, item in value.items()}


def _planned(loss: Callable[[int], Tensor], n: int) -> koila_rl.Plan:
    plan = koila_rl.plan(loss(n))
    _ = plan.peak_bytes  # traced while the card is there
    return plan


def _or_none(loss: Callable[[int], Tensor], n: int) -> koila_rl.Plan | None:
    try:
        return _planned(loss, n)
    except InsufficientMemoryError:
        return None


def _resident(learner: BaseAgent) -> tuple[int, int]:
    """Bytes of all networks, and of the optimizer's state once it has stepped."""
    modules = [x for x in vars(learner).values() if isinstance(x, nn.Module)]
    held = {
        id(tensor): tensor
        for module in modules
        for tensor in (*module.parameters(), *module.buffers())
    }
    learned = [p for group in learner.optimizer.param_groups for p in group["params"]]
    moments = 2 if isinstance(learner.optimizer, (torch.optim.Adam, torch.optim.AdamW)) else 0
    state = sum(moments * round_to_block(p.nbytes) for p in learned)
    return sum(round_to_block(tensor.nbytes) for tensor in held.values()), state
