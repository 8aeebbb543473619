"""Buffers are the loader: rollout and replay storage that feeds microbatches."""

from koila_rl.buffers.rollout import RolloutBuffer

__all__ = ["RolloutBuffer"]
