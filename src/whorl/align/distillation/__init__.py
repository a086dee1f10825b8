"""Distillation: a student learns a teacher's distribution, from given texts or from its own completions."""
