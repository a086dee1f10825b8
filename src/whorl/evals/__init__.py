"""How good is it: bits per byte, generation that can be checked, and the baselines they stand beside."""
