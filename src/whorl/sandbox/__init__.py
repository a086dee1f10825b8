"""Running programs that nobody trusts, for rewards and evaluations."""
