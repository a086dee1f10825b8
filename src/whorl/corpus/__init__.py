"""From raw files to documents that are measured, selected and split.

`ingest` turns sources into immutable documents and a quarantine. `curate` writes attributes, a selection and its splits
into side files. `Corpus` streams the documents of a split. See `docs/corpus.md`.
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
