"""Middleware of the server: authentication, rate limits, admission, metrics."""
