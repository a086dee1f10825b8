"""The scheduler: which sequences run in a step, and how many prompt tokens fit in it."""
