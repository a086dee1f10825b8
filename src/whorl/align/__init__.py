"""Alignment: training after pretraining, from conversations, preferences, rewards and teachers."""
