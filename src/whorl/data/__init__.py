"""Records of files, and the order in which they are trained on. See `docs/corpus.md`."""
