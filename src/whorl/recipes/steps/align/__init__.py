"""Recipe steps of alignment."""
