"""Measures: named, versioned functions of documents' texts, whose columns the selection queries.

    found = measure_files([MeasureConfig(name="text", measure="text")], documents, UnitStore(folder), LocalPool(4))

A measure drops no document and changes no text. See `docs/corpus.md`.
"""
