"""Buffers are the loader: rollout and replay storage that feeds microbatches."""

from koila_rl.buffers.prioritized import PrioritizedReplayBuffer
from koila_rl.buffers.replay import ReplayBuffer
from koila_rl.buffers.rollout import RolloutBuffer
from koila_rl.buffers.wrapping import wrap

__all__ = ["PrioritizedReplayBuffer", "ReplayBuffer", "RolloutBuffer", "wrap"]
