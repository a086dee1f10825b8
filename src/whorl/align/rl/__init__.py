"""Reinforcement learning from verifiable rewards: rollouts, advantages, policy optimization."""
