"""Documents that hold items of test sets, found by word n-grams. See `docs/corpus.md`."""

from whorl.corpus.decontamination.attributes import (
    CONTAMINATION_FILE,
    fingerprint_items,
    read_items,
    write_contamination,
)
from whorl.corpus.decontamination.items import ItemIndex, TestItem, read_test_set
from whorl.corpus.decontamination.match import Contamination, find_contamination, find_items, score_hits
from whorl.corpus.decontamination.words import hash_words, split_words

__all__ = [
    "CONTAMINATION_FILE",
    "Contamination",
    "ItemIndex",
    "TestItem",
    "find_contamination",
    "find_items",
    "fingerprint_items",
    "hash_words",
    "read_items",
    "read_test_set",
    "score_hits",
    "split_words",
    "write_contamination",
]
