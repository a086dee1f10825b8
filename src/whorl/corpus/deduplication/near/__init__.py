"""Near duplicates by MinHash: stages (`stages.py`), verified removal (`verify.py`), clusters for the split (`clusters`)."""
