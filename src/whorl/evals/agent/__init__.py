"""Agents: a model that acts in a folder by calls of tools, with budgets, and the trajectory of its calls."""
