"""Supervised fine-tuning and the training stage that preference methods share with it."""
