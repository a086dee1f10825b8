"""The learner: gradient accumulation, updates, exponential moving average, loss scaling, the training loop."""
