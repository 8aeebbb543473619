"""Buffers are the loader: rollout and replay storage that feeds microbatches."""

from koila_rl.buffers.prioritized import PrioritizedReplayBuffer
from koila_rl.buffers.replay import ReplayBuffer
from koila_rl.buffers.rollout import RolloutBuffer

__all__ = ["PrioritizedReplayBuffer", "ReplayBuffer", "RolloutBuffer"]
