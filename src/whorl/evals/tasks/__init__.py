"""Tasks of an evaluation: configuration, templates, records and items."""
