"""``koila-rl train``, ``koila-rl evaluate`` and ``koila-rl plan``.

Everything a person can get wrong ends in one line on stderr and exit code 2, with nothing
written.
"""

from __future__ import annotations

import ast
import contextlib
import difflib
import io
import re
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

from koila_rl.errors import ConfigurationError, KoilaError

__all__ = ["main"]

_WORDS = ("True", "False", "None")


@dataclass
class Train:
    """Train an agent and leave a folder of results. Hyperparameters are flags as well."""

    env: str
    """Name of a gymnasium environment, such as CartPole-v1."""
    agent: str = "ppo"
    """Which algorithm."""
    total_timesteps: int = 100_000
    """Environment steps to learn from."""
    seed: int = 0
    """Of weights, actions, minibatches and environments."""
    n_envs: int | None = None
    """Environments side by side; the preset's number if not given."""
    vectorization: str = "sync"
    """sync, or async for a process an environment."""
    device: str = "auto"
    """auto, cpu, cuda, …"""
    memory: str = "auto"
    """What an update may take: bytes, 64MiB, 2GiB, or a fraction of what is free such as 0.5."""
    microbatch: int | None = None
    """Samples that run at once; planned from the memory if not given."""
    tune: bool = False
    """Whether to time the microbatch sizes that fit and keep the fastest."""
    compile: bool = False
    """Whether to hand updates that repeat to torch.compile."""
    run_dir: Path | None = None
    """Folder of the run; a fresh one in runs/ if not given."""
    resume: Path | None = None
    """Folder of a run to go on with."""
    progress: bool = True
    """Whether to show a progress bar."""


@dataclass
class Evaluate:
    """Play whole episodes with the agent of a run and print how it did."""

    run: Path
    """Folder of the run."""
    episodes: int = 20
    """How many."""
    seed: int = 0
    """Of the environments."""
    video: Path | None = None
    """File, .gif or .mp4, into which one more episode is filmed."""


@dataclass
class PlanCard:
    """Say what an update would take on a card, without one. Hyperparameters are flags as well."""

    env: str
    """Name of a gymnasium environment, such as CartPole-v1."""
    agent: str = "ppo"
    """Which algorithm."""
    card: str = "8GiB"
    """All memory of the card."""
    device: str = "cuda"
    """cuda or cpu; it need not exist here."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    try:
        return _run(list(sys.argv[1:] if arguments is None else arguments))
    except KoilaError as error:
        print(f"koila-rl: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as error:
        saved, failure = "what was learned so far is saved", error.__cause__
        saved = saved if failure is None else f"saving failed: {type(failure).__name__}: {failure}"
        print(f"koila-rl: interrupted; {' '.join(saved.split())}", file=sys.stderr)
        return 130


def _run(arguments: list[str]) -> int:
    # Imported here, since tyro is needed for the command line only.
    import tyro

    if arguments == ["--version"]:
        print(f"koila-rl {version('koila-rl')}")
        return 0
    arguments, hyperparameters = _take_hyperparameters(arguments)
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            command, unknown = tyro.cli(
                Annotated[Train, tyro.conf.subcommand("train", description=_train_help())]
                | Annotated[Evaluate, tyro.conf.subcommand("evaluate")]
                | Annotated[PlanCard, tyro.conf.subcommand("plan")],
                prog="koila-rl",
                args=arguments,
                return_unknown_args=True,
                config=(tyro.conf.PositionalRequiredArgs,),
            )
    except SystemExit as end:
        if not complaint.getvalue():
            raise
        # tyro draws a box of several lines; everybody else's tools expect one.
        words = re.sub(r"[^\x20-\x7e]+|[-=]{4,}", " ", complaint.getvalue())
        raise ConfigurationError(words) from end
    if unknown:
        raise ConfigurationError(_unknown(unknown[0], command))
    if isinstance(command, Train):
        return _train(command, hyperparameters)
    if isinstance(command, PlanCard):
        return _plan(command, hyperparameters)
    if hyperparameters:
        raise ConfigurationError(f"evaluate takes no hyperparameters, but got {hyperparameters}")
    return _evaluate(command)


def _train(command: Train, hyperparameters: dict[str, Any]) -> int:
    import koila_rl

    with koila_rl.limits(microbatch=command.microbatch, compile=command.compile):
        result = koila_rl.train(
            command.env,
            command.agent,
            command.total_timesteps,
            seed=command.seed,
            n_envs=command.n_envs,
            vectorization=command.vectorization,
            device=command.device,
            memory=_number(command.memory),
            tune=command.tune,
            run_dir=command.run_dir,
            progress=command.progress,
            resume=command.resume,
            **hyperparameters,
        )
    print(f"Play it: {_called()} evaluate {result.run_dir}")
    return 0


def _called() -> str:
    """How to call this command again: by its name only where the shell finds it."""
    here = Path(sys.argv[0])
    if here.name != "koila-rl" or shutil.which("koila-rl"):
        return "koila-rl"
    return str(here)


def _evaluate(command: Evaluate) -> int:
    import koila_rl
    from koila_rl.run_folder import read_config

    config = read_config(command.run)
    if not config["env_is_name"]:
        raise ConfigurationError(
            f"{command.run} was trained on {config['env']}, which has no name to make it by; "
            "use koila_rl.evaluate(koila_rl.load(run), env)"
        )
    result = koila_rl.evaluate(
        koila_rl.load(command.run),
        config["env"],
        command.episodes,
        command.seed,
        env_kwargs=config["env_kwargs"],
        video=command.video,
    )
    print(f"{config['env']}: {result}")
    return 0


def _plan(command: PlanCard, hyperparameters: dict[str, Any]) -> int:
    from koila_rl.cards import plan_on_card
    from koila_rl.training import agent_named

    kind = agent_named(command.agent)
    batch_size = hyperparameters.pop("batch_size", kind.hyperparameters_type().batch_size)
    print(
        plan_on_card(command.env, kind, batch_size, command.card, command.device, **hyperparameters)
    )
    return 0


def _hyperparameter_defaults() -> dict[str, Any]:
    """Of all agents together; which of them an agent has is checked where it is made."""
    from koila_rl.training import AGENTS

    return {
        field.name: field.default
        for kind in reversed(AGENTS.values())
        for field in fields(kind.hyperparameters_type)
    }


def _train_help() -> str:
    from koila_rl.training import AGENTS

    flags = "; ".join(
        f"{name}: "
        + ", ".join(
            f"--{field.name.replace('_', '-')} ({field.default})"
            for field in fields(kind.hyperparameters_type)
        )
        for name, kind in AGENTS.items()
    )
    return (
        "Train an agent and leave a folder of results. Hyperparameters are flags as well, named "
        f"as in Stable-Baselines3, with these defaults. {flags}. 'linear:1e-3' falls from 1e-3 "
        "to 0. Environments with a preset start from that."
    )


def _take_hyperparameters(arguments: list[str]) -> tuple[list[str], dict[str, Any]]:
    """Split off ``--name value`` and ``--name=value`` of hyperparameters."""
    names = _hyperparameter_defaults()
    rest: list[str] = []
    taken: dict[str, Any] = {}
    remaining = iter(arguments)
    for argument in remaining:
        flag, equals, value = argument.partition("=")
        name = flag.removeprefix("--").replace("-", "_")
        if not flag.startswith("--") or name not in names:
            rest.append(argument)
            continue
        if not equals:
            value = next(remaining, "")
            if not value or value.startswith("--"):
                raise ConfigurationError(f"{flag} needs a value")
        taken[name] = _value(flag, value)
    return rest, taken


def _value(flag: str, text: str) -> Any:
    from koila_rl.agents.schedules import Linear

    try:
        if text.startswith("linear:"):
            return Linear(float(text.removeprefix("linear:")))
        return text if text.isidentifier() and text not in _WORDS else ast.literal_eval(text)
    except (ValueError, SyntaxError) as error:
        raise ConfigurationError(
            f"{flag} is {text!r}; give a number, True, False, None, a tuple such as 64,64, or "
            "linear:NUMBER"
        ) from error


def _number(text: str) -> int | float | str:
    """Bytes and fractions as numbers, everything else as it is."""
    try:
        return int(text)
    except ValueError:
        pass
    try:
        return float(text)
    except ValueError:
        return text


def _unknown(argument: str, command: Train | Evaluate | PlanCard) -> str:
    flags = [field.name for field in fields(command)]
    if not isinstance(command, Evaluate):
        flags += _hyperparameter_defaults()
    name = argument.partition("=")[0].removeprefix("--").replace("-", "_")
    near = difflib.get_close_matches(name, flags, n=3)
    hint = ", ".join(f"--{flag.replace('_', '-')}" for flag in near)
    return f"unknown argument {argument!r}" + (f"; did you mean {hint}?" if near else "")
