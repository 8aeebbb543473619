"""Agents written in the order of their papers, on the public names of koila_rl alone."""

from koila_rl.agents.dqn import DQN
from koila_rl.agents.ppo import PPO
from koila_rl.agents.recurrent_ppo import RecurrentPPO
from koila_rl.agents.schedules import Linear

__all__ = ["DQN", "PPO", "Linear", "RecurrentPPO"]
