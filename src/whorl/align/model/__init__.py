"""Policy models for alignment: examples, batches, log-probabilities, sampled completions."""
