"""Verbs of one corpus: `whorl corpus ingest`, `filter`, `dedup`, `stats`, `show`, `why`."""
