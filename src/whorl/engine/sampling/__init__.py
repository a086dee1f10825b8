"""Token sampling: probabilities, penalties, grammars, stop strings."""
