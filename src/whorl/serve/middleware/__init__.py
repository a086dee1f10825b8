"""Authentication, rate limits, admission, metrics."""
