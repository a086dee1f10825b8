"""The learner: micro-batches, gradient accumulation, updates, the training loop."""
