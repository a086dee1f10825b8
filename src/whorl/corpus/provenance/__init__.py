"""Why each document is in or out: its source, its measures, the rule that dropped it, the copy that stayed, its split."""
