"""Recipe steps of pretraining: the plan, the run, and models for smaller budgets from it."""
