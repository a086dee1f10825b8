"""Loading what drafts tokens for an engine, and measuring it."""
