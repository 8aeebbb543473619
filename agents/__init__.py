"""Agents written in the order of their papers, on the public names of koila_rl alone."""
