"""Objectives of generative models: pure functions of tensors, one file per family."""
