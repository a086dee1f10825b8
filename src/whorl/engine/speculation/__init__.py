"""What drafts tokens for an engine: the proposers, loading and measuring them."""
