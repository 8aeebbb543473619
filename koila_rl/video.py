"""Pictures of an agent at play, as a GIF or a film."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from koila_rl.checkpoint import write_atomically
from koila_rl.envs import VectorEnvironment, on_own_environment
from koila_rl.errors import ConfigurationError, MissingDependencyError
from koila_rl.making import EnvironmentLike, make_rendering, missing

__all__ = ["check_film", "record"]


def record(
    agent: Any,
    env: EnvironmentLike,
    path: str | Path,
    *,
    seed: int = 0,
    deterministic: bool = True,
    env_kwargs: dict[str, Any] | None = None,
    max_frames: int = 3_000,
) -> int:
    """Film one episode of ``agent`` into ``path``, ``.gif`` or ``.mp4``; the number of frames.

    ``env`` is a name, or an environment or factory whose ``render_mode`` is ``"rgb_array"``.

    Raises:
        ConfigurationError: The environment does not render, or the file's ending is another.
        MissingDependencyError: ``.mp4`` without moviepy, the extra ``video``, or the environment
            draws with a package that is not installed.
    """
    path = Path(path)
    _check_path(path)
    frames: list[NDArray[np.uint8]] = []
    single = make_rendering(env, env_kwargs or {})
    try:
        fps = int(single.metadata.get("render_fps", 30))
        vector = VectorEnvironment(gym.vector.SyncVectorEnv(
            [lambda: single], autoreset_mode=gym.vector.AutoresetMode.DISABLED
        ))  # fmt: skip
        if on_own_environment(agent, vector):
            agent.restart()
        forget = getattr(agent, "forget", lambda: None)
        forget()
        observation = vector.reset(seed=seed)
        frames.append(_frame(single))
        over = False
        while not over and len(frames) < max_frames:
            step = vector.step(agent.act(observation, deterministic=deterministic))
            observation, over = step.observation, bool((step.terminated | step.truncated)[0])
            # After the last step the environment shows the next episode.
            if not over:
                frames.append(_frame(single))
    finally:
        if isinstance(env, str) or callable(env):
            single.close()
    _write(path, frames, fps)
    return len(frames)


def check_film(env: EnvironmentLike, path: str | Path, env_kwargs: dict[str, Any] | None) -> None:
    """Refuse what :func:`record` would, by drawing the first frame of ``env``.

    Raises:
        ConfigurationError: As of :func:`record`.
        MissingDependencyError: As of :func:`record`.
    """
    _check_path(Path(path))
    single = make_rendering(env, env_kwargs or {})
    try:
        single.reset()
        _frame(single)
    finally:
        if isinstance(env, str) or callable(env):
            single.close()


def _check_path(path: Path) -> None:
    if path.suffix not in (".gif", ".mp4"):
        raise ConfigurationError(f"video {path} must end in .gif or .mp4")
    if path.suffix == ".mp4":
        try:
            import moviepy  # noqa: F401
        except ImportError as error:
            raise MissingDependencyError(
                f"writing {path} needs moviepy: pip install 'koila-rl[video]', or name a .gif"
            ) from error


def _frame(env: gym.Env[Any, Any]) -> NDArray[np.uint8]:
    if env.render_mode != "rgb_array":
        raise ConfigurationError(
            f"{env} has render_mode {env.render_mode!r}; make it with render_mode='rgb_array'"
        )
    try:
        return np.array(env.render(), dtype=np.uint8)
    except gym.error.DependencyNotInstalled as error:
        raise missing(f"{env} cannot be filmed", error) from error


def _write(path: Path, frames: list[NDArray[np.uint8]], fps: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".mp4":
        from moviepy import ImageSequenceClip

        ImageSequenceClip(frames, fps=fps).write_videofile(str(path), logger=None)
        return
    # Pillow comes with matplotlib.
    from PIL import Image

    first, *rest = (Image.fromarray(frame) for frame in frames)
    content = io.BytesIO()
    first.save(
        content, format="GIF", save_all=True, append_images=rest, duration=1000 // fps, loop=0
    )
    write_atomically(path, content.getvalue())
