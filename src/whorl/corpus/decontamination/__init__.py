"""Documents that hold items of test sets, found by word n-grams. See `docs/corpus.md`."""
