"""The corpus room: from bytes on a disk to documents, measured, selected and split.

Two steps and a reader. `ingest` turns sources into immutable documents and a quarantine; `curate` writes
attributes beside them, and a selection with its splits; `Corpus` streams the documents of a split to every
later room. `docs/corpus.md` tells it in a page.
"""

from whorl.corpus.config import CurateConfig, IngestConfig
from whorl.corpus.curate import curate
from whorl.corpus.documents import Document, RejectedDocument
from whorl.corpus.ingest import ingest
from whorl.corpus.reader import Corpus, document_files
from whorl.corpus.sources import fingerprint

__all__ = [
    "Corpus",
    "CurateConfig",
    "Document",
    "IngestConfig",
    "RejectedDocument",
    "curate",
    "document_files",
    "fingerprint",
    "ingest",
]
