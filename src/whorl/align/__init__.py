"""Alignment: what is learnt after pretraining, from conversations, preferences, rewards and teachers."""
