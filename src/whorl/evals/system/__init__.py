"""A system under evaluation: a model with retrieval, tools and a guard."""
