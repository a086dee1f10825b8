"""The held-out documents of a model: the test split of the corpus in its lineage."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from whorl.corpus import Corpus, Document
from whorl.errors import ConfigError, StoreError
from whorl.store import Artifact, Store


def held_out_documents(store: Store, ref: str, split: str = "test") -> list[tuple[str, str]]:
    """Return (path, text) of the held-out documents of the nearest corpus among the ancestors of an artifact.

    Args:
        ref: a model, or the selection of a corpus itself.

    Raises:
        StoreError: no such artifact. ConfigError: it has no corpus, as a folder or an endpoint.
    """
    try:
        given = store.open(ref)
    except StoreError:
        if not Path(ref).is_dir() and "://" not in ref:
            raise
        raise ConfigError(
            f"{ref} is no artifact of the store {store.root}, so it has no corpus", expected="--corpus ARTIFACT",
            do="name the artifact of `curate` with --corpus; `whorl ls` lists all",
        ) from None  # fmt: skip
    for artifact in ancestors(store, given):
        documents = (
            store.find(artifact.parents.get("documents", "")) if artifact.kind == "selection" else None
        )
        if documents is not None:
            documents.check()
            artifact.check()
            return named_texts(Corpus(documents.path, artifact.path).documents(split))
    raise ConfigError(
        f"{ref} has no corpus among its ancestors in this store", expected="a model of a recipe, or --corpus ARTIFACT",
        do="name the artifact of `curate` with --corpus",
    )  # fmt: skip


def named_texts(documents: Iterable[Document]) -> list[tuple[str, str]]:
    """Return (path, text) of documents; a file with several documents has their offsets in the paths."""
    found = list(documents)
    counts = Counter(document.path for document in found)
    return [(d.path if counts[d.path] == 1 else f"{d.path}#{d.offset}", d.text) for d in found]


def ancestors(store: Store, artifact: Artifact) -> Iterator[Artifact]:
    """Yield the artifact and its ancestors, the nearest first."""
    queue, seen = [artifact], {artifact.address}
    while queue:
        current = queue.pop(0)
        yield current
        for address in current.parents.values():
            parent = store.find(address)
            if parent is not None and address not in seen:
                seen.add(address)
                queue.append(parent)
