"""The recipe steps, which connect the packages; `registry.step_kinds` finds them."""
