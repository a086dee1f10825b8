"""The step `evaluate`: likelihood of held-out files, a suite of tasks, and samples."""
