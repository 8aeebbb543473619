"""``train(...)``: an environment and a name in, a trained agent and a folder of results out."""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

import koila_rl
from koila_rl.account import UpdateAccount
from koila_rl.agents import hyperparameters as hyper
from koila_rl.agents.base import BaseAgent, read_agent
from koila_rl.agents.dqn import DQN
from koila_rl.agents.interface import Progress, says_stop
from koila_rl.agents.ppo import PPO
from koila_rl.agents.presets import preset
from koila_rl.agents.recurrent_ppo import RecurrentPPO
from koila_rl.arguments import whole
from koila_rl.checkpoint import write_atomically
from koila_rl.envs import EnvironmentLike, Episode
from koila_rl.errors import ConfigurationError
from koila_rl.memory.tuner import keeping_sizes
from koila_rl.metrics import RunLog, draw_learning_curve, read_episodes
from koila_rl.progress import Display
from koila_rl.run_folder import (
    TUNED,
    as_folder,
    check_writable,
    choose,
    read_config,
    read_tuned,
    write_json,
)

__all__ = ["AGENTS", "TrainResult", "agent_named", "load", "train"]

AGENTS: dict[str, type[BaseAgent]] = {kind.name: kind for kind in (PPO, RecurrentPPO, DQN)}

Callback = Callable[[Progress], "bool | None"]

_SAVES = 20
_SEEDS = 2**32 - 1


@dataclass(frozen=True)
class TrainResult:
    """What :func:`train` came to."""

    agent: BaseAgent
    returns: tuple[float, ...]
    """Return of each episode that ended, oldest first."""
    run_dir: Path
    plan: koila_rl.Plan | None
    """The plan of the last update: how many samples ran at once, and the memory they took."""


def train(
    env: EnvironmentLike,
    agent: str = "ppo",
    total_timesteps: int = 100_000,
    *,
    seed: int = 0,
    n_envs: int | None = None,
    env_kwargs: dict[str, Any] | None = None,
    vectorization: str = "sync",
    device: torch.device | str = "auto",
    memory: int | float | str = "auto",
    tune: bool = False,
    run_dir: str | Path | None = None,
    progress: bool = True,
    callbacks: Callback | Iterable[Callback] = (),
    resume: str | Path | None = None,
    **hyperparameters: Any,
) -> TrainResult:
    """Learn ``env`` and leave a folder with everything that came of it.

    Args:
        env: Name of a gymnasium environment, an environment, a function that makes one, or a
            vector environment.
        agent: ``"ppo"``, ``"recurrent_ppo"`` or ``"dqn"``.
        total_timesteps: Environment steps to learn from.
        seed: Of everything random.
        n_envs: Environments side by side; the preset's number where not said.
        env_kwargs: For the environment, where it is a name; put over the preset's.
        vectorization: ``"sync"``, or ``"async"`` for a process an environment.
        device: ``"auto"`` keeps small networks on the CPU.
        memory: What an update may take above what is resident: bytes, ``"2GiB"``, a fraction of
            what is free, or ``"auto"`` for what is free.
        tune: Time the microbatch sizes that fit over the first updates and keep the fastest. It
            is written into ``tuned.json``, and what is found there is not timed again on resume.
        run_dir: Folder of the run; a fresh one in ``runs/`` where not said.
        progress: Whether to show a progress bar and a table at the end.
        callbacks: One, or several, called with a ``Progress`` after each update; False ends
            learning.
        resume: Folder of a run to go on with, by its seed and, where they are not said, its
            hyperparameters and memory. Environments start new episodes. A hyperparameter that
            was a function of your own has to be said again.
        hyperparameters: Named as in Stable-Baselines3. They go before the preset of the
            environment, where there is one (``koila_rl.agents.presets``).

    The folder holds ``config.json``, ``metrics.csv``, ``episodes.csv``, ``tensorboard/``,
    ``agent.pt``, ``learning_curve.png`` and ``plan.txt``, with ``tune`` ``tuned.json``, and
    ``replay/`` where the agent has one.
    An interrupted run leaves them too.

    Raises:
        ConfigurationError: An argument cannot be used; nothing has been written.
        UnsupportedError: So is a space or autoreset mode.
    """
    total_timesteps, seed = (
        whole("total_timesteps", total_timesteps),
        whole("seed", seed, 0, _SEEDS),
    )
    n_envs = None if n_envs is None else whole("n_envs", n_envs)
    run_dir, resume = as_folder("run_dir", run_dir), as_folder("resume", resume)
    callbacks = _listed(callbacks)
    if run_dir is not None:
        check_writable(run_dir)
    kind = agent_named(agent)
    state = None if resume is None else read_agent(resume / "agent.pt")
    settings, tuned = preset(agent, env), dict[str, int]()
    if resume is not None and state is not None:
        _check_resumed(state, agent, total_timesteps, resume, hyperparameters)
        settings = hyper.restore(state["hyperparameters"])
        config = read_config(resume)
        settings |= {"n_envs": config["n_envs"], "env_kwargs": config["env_kwargs"]}
        tune, tuned = tune or config.get("tune", False), read_tuned(resume)
        seed, memory = config["seed"], config["memory"] if memory == "auto" else memory
    environments = settings.pop("n_envs", None)
    env_kwargs = {**settings.pop("env_kwargs", {}), **(env_kwargs or {})}
    if isinstance(env, str) or callable(env):
        n_envs = n_envs or environments
    settings.update(hyperparameters)
    with contextlib.ExitStack() as stack:
        if memory != "auto":
            stack.enter_context(koila_rl.limits(memory=memory))
        if tune:
            stack.enter_context(koila_rl.limits(tune=True))
        stack.enter_context(keeping_sizes(tuned))
        learner = kind(
            env,
            n_envs=n_envs,
            env_kwargs=env_kwargs,
            vectorization=vectorization,
            seed=seed,
            device=device,
            **settings,
        )
        assert learner.env is not None
        if isinstance(env, str) or callable(env):
            stack.callback(learner.env.close)
        if resume is not None and state is not None:
            learner.restore(state)
            learner.load_memory(resume)
        run_dir = choose(run_dir, resume, env, agent, seed)
        config = {
            "env": env if isinstance(env, str) else repr(env),
            "env_is_name": isinstance(env, str),
            "env_kwargs": env_kwargs,
            "agent": agent,
            "total_timesteps": total_timesteps,
            "seed": seed,
            "n_envs": learner.env.n_envs,
            "device": str(learner.device),
            "device_reason": learner.device_reason,
            "memory": memory,
            "tune": tune,
            "hyperparameters": hyper.describe(learner.hyperparameters),
            "versions": {name: version(name) for name in ("koila-rl", "torch", "gymnasium")},
        }
        write_json(run_dir / "config.json", config)
        try:
            return _learn(
                learner, total_timesteps, run_dir, str(config["env"]), progress, callbacks
            )
        finally:
            if tuned:
                write_json(run_dir / TUNED, tuned)


def _listed(callbacks: Any) -> tuple[Callback, ...]:
    """One callback or several as a tuple."""
    try:
        listed = (callbacks,) if callable(callbacks) else tuple(callbacks)
    except TypeError:
        listed = (None,)
    if not all(callable(one) for one in listed):
        raise ConfigurationError(f"callbacks is {callbacks!r} but must be functions of a Progress")
    return listed


def _check_resumed(
    state: dict[str, Any], agent: str, total_timesteps: int, resume: Path, given: Collection[str]
) -> None:
    if state["agent"] != agent:
        raise ConfigurationError(
            f"{resume} is a run of agent {state['agent']!r}, but agent is {agent!r}"
        )
    if state["num_timesteps"] >= total_timesteps:
        raise ConfigurationError(
            f"{resume} has seen {state['num_timesteps']} transitions already and "
            f"total_timesteps, which counts them too, is {total_timesteps}; raise it to go on"
        )
    for name, function in hyper.lost(state["hyperparameters"]).items():
        if name not in given:
            raise ConfigurationError(
                f"{resume} learned with a {name} that was a function, {function}, which a "
                f"checkpoint cannot hold; hand over {name} again to go on"
            )


def load(path: str | Path, device: torch.device | str = "auto") -> BaseAgent:
    """The agent of a run's folder or of a file that ``agent.save`` wrote; it acts, as it did.

    Nothing pickled is run.

    Raises:
        ConfigurationError: There is no agent, or it is of a kind that is not known.
    """
    path = Path(path)
    state = read_agent(path / "agent.pt" if path.is_dir() else path)
    agent: BaseAgent = agent_named(state["agent"]).from_state(state, device)
    return agent


def _learn(
    learner: BaseAgent,
    total_timesteps: int,
    run_dir: Path,
    title: str,
    progress: bool,
    callbacks: tuple[Callback, ...],
) -> TrainResult:
    """Learn under a progress bar; files are complete however it ends."""
    assert learner.env is not None
    env, log = learner.env, RunLog(run_dir)
    unreported = env.kept = list[Episode]()
    start = learner.num_timesteps
    display = Display(title, total_timesteps, start, progress)
    next_save = start
    plan: koila_rl.Plan | None = None
    account = UpdateAccount(learner.device, learner.network)

    def after_update(state: Progress) -> bool:
        nonlocal next_save, plan
        updated = "train/n_updates" in state.metrics
        plan = koila_rl.last_plan() if updated else plan
        display.update(state.num_timesteps, state.episodes, plan)
        metrics = dict(state.metrics)
        if updated:
            metrics |= account.add(metrics, plan)
        metrics["time/steps_per_second"] = display.steps_per_second(state.num_timesteps)
        if display.mean_return is not None:
            metrics["rollout/mean_return"] = display.mean_return
        # Callbacks may add metrics to the row; each is called, also after one that asks to stop.
        state = replace(state, metrics=metrics)
        try:
            answers = [callback(state) for callback in callbacks]
        finally:
            log.add(state.num_timesteps, metrics, state.episodes)
            del unreported[: len(state.episodes)]
        if state.num_timesteps >= next_save:
            learner.save(run_dir / "agent.pt")
            next_save = state.num_timesteps + total_timesteps // _SAVES
        return not any(map(says_stop, answers))

    def leave_rest() -> None:
        env.kept = None
        log.add_episodes(learner.num_timesteps, unreported)
        log.close()

    def leave_plan() -> None:
        if plan is not None:
            write_atomically(run_dir / "plan.txt", f"{plan}\n".encode())

    def leave_curve() -> None:
        draw_learning_curve(run_dir / "learning_curve.png", read_episodes(run_dir), title)

    def leave_agent() -> None:
        learner.save(run_dir / "agent.pt")
        learner.save_memory(run_dir)

    with _finishing(leave_agent, leave_rest, leave_plan, leave_curve), display:
        learner.learn(total_timesteps, after_update)
    display.summary(learner.num_timesteps, run_dir, plan, account.rows())
    returns = tuple(value for _, value in read_episodes(run_dir))
    return TrainResult(learner, returns, run_dir, plan)


@contextlib.contextmanager
def _finishing(*steps: Callable[[], None]) -> Iterator[None]:
    """Do all ``steps`` at the end, however it comes and whether or not one of them fails.

    An error of the block is raised before one of a step, which is chained to it.
    """
    error, failure = None, None
    try:
        yield
    except BaseException as raised:
        error = raised
    try:
        with contextlib.ExitStack() as ending:
            for step in reversed(steps):
                ending.callback(step)
    except Exception as raised:
        failure = raised
    if error is None and failure is not None:
        raise failure
    if error is not None and failure is not None:
        # What the error itself came from stays at the other end of the chain.
        first: BaseException = failure
        while before := first.__cause__ or first.__context__:
            first = before
        first.__context__ = error.__cause__ or error.__context__
        raise error from failure
    if error is not None:
        raise error


def agent_named(name: str) -> type[BaseAgent]:
    """The class of an agent.

    Raises:
        ConfigurationError: There is none of this name; says a near one.
    """
    if not isinstance(name, str):
        raise ConfigurationError(f"agent is {name!r} but must be a name: {', '.join(AGENTS)}")
    if name not in AGENTS:
        near = difflib.get_close_matches(name, AGENTS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(AGENTS)}"
        raise ConfigurationError(f"unknown agent {name!r}; {hint}")
    return AGENTS[name]
