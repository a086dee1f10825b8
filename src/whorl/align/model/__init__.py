"""Policy models for alignment: batches, log-probabilities, types of sampling."""
