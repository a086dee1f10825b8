"""Methods: one file for each, as the difference from its parent."""
