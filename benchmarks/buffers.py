"""Replay buffers side by side: ours, Stable-Baselines3's, TorchRL's, cpprb's.

    OMP_NUM_THREADS=1 python benchmarks/buffers.py [--case CASE] [--repeats N]

One process, one thread; every library delivers the rows as tensors. Medians of wall time and of
processor time: where other work shares the machine, only the latter says something. A library
that is not installed is left out.
"""

from __future__ import annotations

import argparse
import gc
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from koila_rl.buffers import PrioritizedReplayBuffer, ReplayBuffer

Sampler = Callable[[], Any]
FRAMES, VECTOR = (84, 84, 4), (4,)


def timed(calls: dict[str, Sampler], repeats: int) -> dict[str, tuple[float, float]]:
    """Median wall and processor seconds of each call; they take turns, so drift hits all alike."""
    seconds: dict[str, list[tuple[float, float]]] = {label: [] for label in calls}
    for call in calls.values():
        for _ in range(5):
            call()
    for _ in range(repeats):
        for label, call in calls.items():
            start = time.perf_counter(), time.process_time()
            call()
            wall, processor = time.perf_counter() - start[0], time.process_time() - start[1]
            seconds[label].append((wall, processor))
    return {
        label: (statistics.median(w for w, _ in taken), statistics.median(p for _, p in taken))
        for label, taken in seconds.items()
    }


def show(title: str, seconds: dict[str, tuple[float, float]]) -> None:
    print(f"\n{title}\n{'':<36}{'wall':>10}{'processor':>12}")
    for label, (wall, processor) in sorted(seconds.items(), key=lambda item: item[1][1]):
        print(f"  {label:<34}{wall * 1e6:>10.1f}{processor * 1e6:>12.1f} µs")


def transitions(n: int, shape: tuple[int, ...], rng: np.random.Generator) -> dict[str, Any]:
    def observations() -> np.ndarray:
        if len(shape) > 1:
            return rng.integers(0, 256, (n, *shape), dtype=np.uint8)
        return rng.standard_normal((n, *shape), dtype=np.float32)

    return {
        "observation": observations(),
        "following": observations(),
        "action": rng.integers(0, 4, n),
        "reward": rng.standard_normal(n, dtype=np.float32),
        "terminated": rng.random(n) < 0.01,
        "truncated": np.zeros(n, dtype=bool),
    }


def tensordict(values: dict[str, Any]) -> TensorDict:
    tensors = {key: torch.from_numpy(value) for key, value in values.items()}
    following = {
        "observation": tensors["following"],
        **{key: tensors[key] for key in ("reward", "terminated", "truncated")},
    }
    n = len(tensors["action"])
    return TensorDict(
        {"observation": tensors["observation"], "action": tensors["action"], "next": following}, [n]
    )


def fill(capacity: int, shape: tuple[int, ...], put: Callable[[dict[str, Any]], None]) -> None:
    rng = np.random.default_rng(0)
    for start in range(0, capacity, 1000):
        put(transitions(min(1000, capacity - start), shape, rng))


def ours(capacity: int, shape: tuple[int, ...], size: int, prioritized: bool) -> Sampler:
    kind = PrioritizedReplayBuffer if prioritized else ReplayBuffer
    buffer = kind(capacity, seed=0)
    fill(capacity, shape, lambda values: buffer.extend(tensordict(values)))
    return lambda: buffer.sample(size, lazy=False)


def stable_baselines3(capacity: int, shape: tuple[int, ...], size: int) -> Sampler | None:
    try:
        from gymnasium import spaces
        from stable_baselines3.common.buffers import ReplayBuffer as Theirs
    except ImportError:
        return None
    if len(shape) > 1:
        space = spaces.Box(0, 255, shape, np.uint8)
    else:
        space = spaces.Box(-np.inf, np.inf, shape, np.float32)
    buffer = Theirs(capacity, space, spaces.Discrete(4), device="cpu")

    def put(values: dict[str, Any]) -> None:
        for i in range(len(values["action"])):
            row = {key: value[i : i + 1] for key, value in values.items()}
            buffer.add(
                row["observation"], row["following"], row["action"], row["reward"],
                row["terminated"], [{}],
            )  # fmt: skip

    fill(capacity, shape, put)
    return lambda: buffer.sample(size)


def torchrl(capacity: int, shape: tuple[int, ...], size: int, prioritized: bool) -> Sampler | None:
    try:
        from torchrl.data import LazyTensorStorage, TensorDictPrioritizedReplayBuffer
        from torchrl.data import TensorDictReplayBuffer as Theirs
    except ImportError:
        return None
    storage = LazyTensorStorage(capacity)
    if prioritized:
        try:
            buffer = TensorDictPrioritizedReplayBuffer(
                alpha=0.6, beta=0.4, storage=storage, batch_size=size
            )
        except RuntimeError:  # its compiled sum tree does not load beside every torch
            return None
    else:
        buffer = Theirs(storage=storage, batch_size=size)
    fill(capacity, shape, lambda values: buffer.extend(tensordict(values)))
    return buffer.sample


def cpprb(capacity: int, shape: tuple[int, ...], size: int, prioritized: bool) -> Sampler | None:
    try:
        import cpprb as library
    except ImportError:
        return None
    dtype = np.uint8 if len(shape) > 1 else np.float32
    columns = {
        "observation": {"shape": shape, "dtype": dtype},
        "following": {"shape": shape, "dtype": dtype},
        "action": {"dtype": np.int64},
        "reward": {"dtype": np.float32},
        "terminated": {"dtype": bool},
        "truncated": {"dtype": bool},
    }
    kind = library.PrioritizedReplayBuffer if prioritized else library.ReplayBuffer
    buffer = kind(capacity, columns)
    fill(capacity, shape, lambda values: buffer.add(**values))
    arguments = {"beta": 0.4} if prioritized else {}

    def draw() -> dict[str, torch.Tensor]:
        drawn = buffer.sample(size, **arguments)
        return {key: torch.from_numpy(value) for key, value in drawn.items()}

    return draw


def index_select(capacity: int, shape: tuple[int, ...], size: int) -> Sampler:
    """The floor: observation and next observation by one torch.index_select each."""
    rng = np.random.default_rng(0)
    values = tensordict(transitions(capacity, shape, rng))
    columns = [values["observation"], values["next", "observation"]]
    generator = torch.Generator().manual_seed(0)

    def draw() -> list[torch.Tensor]:
        index = torch.randint(0, capacity, (size,), generator=generator)
        return [column.index_select(0, index) for column in columns]

    return draw


def compare_samples(
    shape: tuple[int, ...], capacity: int, size: int, repeats: int, prioritized: bool
) -> None:
    calls: dict[str, Sampler | None] = {
        "koila_rl": ours(capacity, shape, size, prioritized),
        "torchrl": torchrl(capacity, shape, size, prioritized),
        "cpprb": cpprb(capacity, shape, size, prioritized),
    }
    if not prioritized:
        calls["stable-baselines3"] = stable_baselines3(capacity, shape, size)
        calls["torch.index_select, two columns"] = index_select(capacity, shape, size)
    kind = "prioritized" if prioritized else "uniform"
    found = {label: call for label, call in calls.items() if call is not None}
    show(f"{kind}, {size} of {capacity:,} transitions of {shape}", timed(found, repeats))
    calls.clear()
    found.clear()
    gc.collect()


def stacked_steps(n: int, start: int, episode: int) -> TensorDict:
    """Steps of an environment whose observations stack its last four frames."""
    at = torch.arange(start, start + n)
    age = at % episode
    frames = lambda t: (t * 7919 % 251).to(torch.uint8)  # noqa: E731
    back = torch.arange(3, -1, -1)
    first = at - age
    stack = torch.maximum(at[:, None] - back, first[:, None]) + at[:, None] // episode
    ahead = torch.maximum(at[:, None] + 1 - back, first[:, None]) + at[:, None] // episode
    ended = age == episode - 1

    def images(times: torch.Tensor) -> torch.Tensor:
        return frames(times)[:, :, None, None].expand(n, 4, 84, 84).contiguous()

    following = {
        "observation": images(ahead),
        "reward": at.float(),
        "terminated": ended,
        "truncated": torch.zeros_like(ended),
    }
    return TensorDict({"observation": images(stack), "action": at, "next": following}, [n])


def deduplicated(repeats: int, steps: int = 100_000) -> None:
    """Bytes of frame-stacked transitions, and the time of a sample and of an extend."""
    buffer = ReplayBuffer(steps, frame_stack=4, n_envs=1, seed=0)
    for start in range(0, steps, 1000):
        buffer.extend(stacked_steps(1000, start, 500))
    scaled = buffer.nbytes * 1_000_000 / steps / 2**30
    print(f"\n{steps:,} frame-stacked transitions: {buffer.nbytes:,} bytes")
    print(f"  a million of them: {scaled:.2f} GiB")
    more = stacked_steps(8, steps, 500)
    calls = {
        "sample of 256": lambda: buffer.sample(256, lazy=False),
        "extend of 8": lambda: buffer.extend(more),
    }
    show("84×84×4 stacked frames, each stored once", timed(calls, repeats))


def writes(repeats: int) -> None:
    rng = np.random.default_rng(0)
    many = tensordict(transitions(8, VECTOR, rng))
    buffer, single = ReplayBuffer(100_000, seed=0), ReplayBuffer(100_000, seed=0)
    one = transitions(1, VECTOR, rng)
    observation, following = one["observation"][0], one["following"][0]

    def add() -> None:
        single.add(
            observation=observation,
            action=np.int64(1),
            next={
                "observation": following,
                "reward": np.float32(1.0),
                "terminated": np.False_,
                "truncated": np.False_,
            },
        )

    show(
        "writing transitions of 4 floats",
        timed({"extend of 8": lambda: buffer.extend(many), "add of 1": add}, repeats),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    cases = ("frames", "vectors", "prioritized", "deduplicated", "writes")
    parser.add_argument("--case", choices=cases, action="append")
    parser.add_argument("--repeats", type=int, default=300)
    options = parser.parse_args()
    chosen, repeats = options.case or cases, options.repeats
    torch.set_num_threads(1)
    print(f"{platform.processor() or platform.machine()}, torch {torch.__version__}, one thread")
    if "frames" in chosen:
        compare_samples(FRAMES, 10_000, 256, repeats, prioritized=False)
    if "vectors" in chosen:
        for size in (32, 256):
            compare_samples(VECTOR, 100_000, size, repeats * 5, prioritized=False)
    if "prioritized" in chosen:
        for size in (32, 256):
            compare_samples(VECTOR, 100_000, size, repeats * 5, prioritized=True)
        compare_samples(FRAMES, 10_000, 256, repeats, prioritized=True)
    if "deduplicated" in chosen:
        deduplicated(repeats)
    if "writes" in chosen:
        writes(repeats * 5)


if __name__ == "__main__":
    main()
