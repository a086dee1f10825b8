"""Coding tasks from Python source: functions with doctests, injected bugs."""
