"""Probes: generated items with a difficulty dial, one in-context skill each. See `docs/evals/suites.md`."""
