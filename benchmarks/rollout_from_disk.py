"""One PPO minibatch of 262,144 observations (3, 64, 64) uint8, 3.2 GB, under 512 MiB.

    OMP_NUM_THREADS=1 python benchmarks/rollout_from_disk.py [--steps 1024] [--folder DIR]

The rollout lies in memory-mapped files. Reported: the plan, the tracked peak, how far the
resident memory of the process grew, the gradient against a loop written by hand, and the time
against the same update from RAM (left out where RAM does not suffice for it).
"""

from __future__ import annotations

import argparse
import os
import tempfile
import threading
import time
from pathlib import Path

import torch
from tensordict import TensorDict
from torch import Tensor, nn

import koila_rl
from koila_rl.memory.tracking import StorageTracker

N_ENVS, CLIP = 256, 0.2


class Policy(nn.Module):
    """A strided convolution and two heads: small, so that moving rows is what takes time."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Conv2d(3, 8, 8, stride=8), nn.ReLU(), nn.Flatten())
        self.actor, self.critic = nn.Linear(512, 4), nn.Linear(512, 1)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        features = self.trunk(images.float() / 255)
        return self.actor(features), self.critic(features).squeeze(-1)


def terms(policy: Policy, part: TensorDict, advantage: Tensor) -> Tensor:
    logits, value = policy(part["observation"])
    log_prob = logits.log_softmax(-1).gather(-1, part["action"][:, None]).squeeze(-1)
    ratio = (log_prob - part["action_log_prob"]).exp()
    surrogate = torch.min(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage)
    return 0.5 * (value - part["value_target"]).pow(2) - surrogate


def loss(policy: Policy, part: TensorDict) -> Tensor:
    advantage = part["advantage"]
    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    return terms(policy, part, advantage).mean()


def by_hand(policy: Policy, rollout: koila_rl.RolloutBuffer, size: int = 1024) -> list[Tensor]:
    """The same gradient, one microbatch at a time over the stored rollout."""
    policy.zero_grad()
    data = rollout.data.flatten()
    total = len(data)
    advantage = data["advantage"]
    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    for start in range(0, total, size):
        part = data[start : start + size]
        (terms(policy, part, advantage[start : start + size]).sum() / total).backward()
        rollout.release()
    return gradients(policy)


def gradients(policy: Policy) -> list[Tensor]:
    return [parameter.grad.clone() for parameter in policy.parameters()]  # type: ignore[union-attr]


def resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


class Resident:
    """The most that the process's resident memory grew by while the block ran."""

    def __enter__(self) -> Resident:
        self.start = self.most = resident()
        self.done = threading.Event()
        self.thread = threading.Thread(target=self.watch)
        self.thread.start()
        return self

    def watch(self) -> None:
        while not self.done.wait(0.01):
            self.most = max(self.most, resident())

    def __exit__(self, *exception: object) -> None:
        self.done.set()
        self.thread.join()
        self.growth = self.most - self.start


def fill(steps: int, storage: Path | str) -> koila_rl.RolloutBuffer:
    rollout = koila_rl.RolloutBuffer(steps, N_ENVS, seed=0, storage=storage)
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        images = torch.randint(0, 256, (N_ENVS, 3, 64, 64), dtype=torch.uint8, generator=generator)
        rollout.add(
            {
                "observation": images,
                "action": torch.randint(0, 4, (N_ENVS,), generator=generator),
                "action_log_prob": -torch.rand(N_ENVS, generator=generator) - 1,
                "advantage": torch.randn(N_ENVS, generator=generator),
                "value_target": torch.randn(N_ENVS, generator=generator),
            }
        )
    rollout.release()
    return rollout


def update(policy: Policy, rollout: koila_rl.RolloutBuffer, memory: str) -> None:
    policy.zero_grad()
    with koila_rl.limits(memory=memory):
        (part,) = rollout.minibatches(rollout.n_steps * N_ENVS)
        loss(policy, part).backward()


def timed(policy: Policy, rollout: koila_rl.RolloutBuffer, memory: str) -> tuple[float, float]:
    """Wall and processor seconds of one update of the whole rollout."""
    start = time.perf_counter(), time.process_time()
    update(policy, rollout, memory)
    return time.perf_counter() - start[0], time.process_time() - start[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=1024)
    parser.add_argument("--memory", default="512MiB")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--folder", type=Path, default=None, help="where the files are made")
    options = parser.parse_args()
    torch.manual_seed(0)
    policy, mib = Policy(), 2**20
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        rollout = fill(options.steps, Path(folder) / "rollout")
        print(f"{options.steps * N_ENVS:,} observations, {rollout.nbytes / 2**30:.2f} GiB on disk")
        with Resident() as growth, StorageTracker(follow_fake=False) as tracked:
            update(policy, rollout, options.memory)
        print(koila_rl.last_plan())
        peak, grown = tracked.peak_bytes / mib, growth.growth / mib
        print(f"tracked peak {peak:.0f} MiB, resident memory grew by {grown:.0f} MiB", flush=True)
        ours, expected = gradients(policy), by_hand(policy, rollout)
        worst = max(
            float((a - b).abs().max() / b.abs().max()) for a, b in zip(ours, expected, strict=True)
        )
        print(f"gradient off by {worst:.1e} of the largest element", flush=True)
        if rollout.nbytes > 0.5 * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES"):
            print("too little RAM to compare")
            return
        in_ram = fill(options.steps, "ram")
        for _ in range(options.repeats):
            disk = timed(policy, rollout, options.memory)
            ram = timed(policy, in_ram, options.memory)
            print(
                f"memory map {disk[0]:.1f} s ({disk[1]:.1f} s of processors), RAM {ram[0]:.1f} s "
                f"({ram[1]:.1f} s): {disk[0] / ram[0]:.2f} times ({disk[1] / ram[1]:.2f})",
                flush=True,
            )


if __name__ == "__main__":
    main()
