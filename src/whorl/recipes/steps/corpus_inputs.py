"""Inputs of a corpus that are no parents: sources, test sets, models of measures, earlier corpora, an encoder."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from whorl.corpus import CurateConfig, IngestConfig, fingerprint
from whorl.corpus.decontamination.attributes import fingerprint_items, read_items
from whorl.corpus.deduplication.earlier import with_digest
from whorl.corpus.deduplication.semantic.vectors import TextEncoder
from whorl.corpus.measures.run import with_model_digest
from whorl.corpus.provenance.catalog import Catalog
from whorl.corpus.provenance.hashes import ContentHashes
from whorl.errors import ConfigError, StoreError
from whorl.store import Store


def with_fingerprint(config: IngestConfig, store: Store) -> IngestConfig:
    """Add a hash of the sources' content to the configuration; sources have no address."""
    return config.model_copy(update={"fingerprint": fingerprint(config, content_hashes(store))})


def content_hashes(store: Store) -> ContentHashes:
    """Return the hashes that a store's catalogue keeps; of a store that cannot be written, none."""
    return ContentHashes(open_catalog(store) if os.access(store.root, os.W_OK) else None)


def find_encoder(name: str, store: Store) -> TextEncoder:
    """Return an embedder of the store, for `curate`. Raises ConfigError: the name is unknown, or no embedder's."""
    expected = "the name of an artifact of the step `embedder`"
    try:
        artifact = store.open(name)
    except StoreError as error:
        raise ConfigError(f"curate.semantic.encoder: {error.what}", expected=expected) from error
    if artifact.kind != "embedder":
        raise ConfigError(
            f"curate.semantic.encoder: {name} is an artifact of {artifact.kind}", expected=expected
        )
    return TextEncoder(artifact.address, f"{__name__}:open_encoder", str(artifact.path))


def open_encoder(path: str) -> Callable[[Sequence[str]], Any]:
    """Return the function that embeds texts, of an embedder's folder."""
    from whorl.embedding.embedder import Embedder
    from whorl.tokens.tokenizer import Tokenizer

    return Embedder.load(Path(path), Tokenizer.load(Path(path))).embed


def open_catalog(store: Store) -> Catalog:
    """Return the catalogue of $WHORL_CATALOG, by default the SQLite file of a store."""
    return Catalog(os.environ.get("WHORL_CATALOG") or store.root / "catalog.sqlite")


def with_file_hashes(config: CurateConfig, store: Store | None = None) -> CurateConfig:
    """Add hashes of earlier corpora, encoder, test sets and models of measures to the configuration; they are no parents."""
    measures = [m if isinstance(m, str) else with_model_digest(m) for m in config.measures]
    earlier = [with_digest(entry, store) for entry in config.earlier]
    config = config.model_copy(update={"measures": measures, "earlier": earlier})
    if config.semantic is not None and store is not None:
        address = find_encoder(config.semantic.encoder, store).address
        config = config.model_copy(
            update={"semantic": config.semantic.model_copy(update={"digest": address})}
        )
    if config.decontaminate is None:
        return config
    fingerprint = fingerprint_items(read_items(config.decontaminate))
    tests = config.decontaminate.model_copy(update={"fingerprint": fingerprint})
    return config.model_copy(update={"decontaminate": tests})
