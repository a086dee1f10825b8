"""The paged KV cache: block pool, per-sequence page tables, memory layout."""
