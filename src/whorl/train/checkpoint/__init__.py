"""Checkpoints: format, asynchronous writer, retention, remote copies."""
